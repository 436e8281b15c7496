"""What one request asks of the sampler and of the end of its text."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from octavo.engine.core.errors import InvalidRequestError
from octavo.engine.core.pooling import Pooling

MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
# Text that may become a stop string is held back, and looking where it begins takes the square of
# its length, between the tokens of all other requests.
MAX_STOP_CHARS = 1000
# Beyond it a power of the length leaves the range of floating point.
MAX_LENGTH_PENALTY = 20.0

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Frozen and validated; field names and ranges are those of the HTTP API.

    `max_tokens` is resolved by the caller (never None): the engine needs no default of its own.
    `seed` None means that the engine draws one. `logprobs` and `prompt_logprobs` are the number
    of best alternatives wanted per token; 0 asks for the token's own value only, None for nothing.
    `bad_words_token_ids` holds the token sequences that must not be produced. `pooling` asks for
    an embedding of the prompt instead of tokens; `max_tokens` is 0 then.
    `use_beam_search` asks for the `n` best texts of a search with `best_of` or `n` beams; a text's
    score is the sum of its log-probabilities / length ** `length_penalty`. Nothing is drawn then.
    `early_stopping` says when a search with as many finished texts as beams is over: at once
    (True), when the best beam would not enter them if it ended now (False), or when it could not
    at any length ("never").
    """

    max_tokens: int
    min_tokens: int = 0
    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    pooling: Pooling | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        _check_range("max_tokens", self.max_tokens, 0, None)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None:
            _check_range("best_of", self.best_of, self.n, MAX_CHOICES)
        _check_range("temperature", self.temperature, 0, 2)
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("top_k", self.top_k, -1, None)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise InvalidRequestError(
                "repetition_penalty must be a finite number above 0", "repetition_penalty"
            )
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings", "stop")
        if "" in self.stop:
            raise InvalidRequestError("stop must not hold an empty string", "stop")
        if max(map(len, self.stop), default=0) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stop takes strings of at most {MAX_STOP_CHARS} characters", "stop"
            )
        _check_range("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.early_stopping not in (False, True, "never"):
            raise InvalidRequestError(
                'early_stopping must be false, true or "never"', "early_stopping"
            )
        if self.use_beam_search:
            self._check_beam_search()

    def _check_beam_search(self) -> None:
        for name, changed in (
            ("presence_penalty", self.presence_penalty != 0),
            ("frequency_penalty", self.frequency_penalty != 0),
            ("repetition_penalty", self.repetition_penalty != 1),
        ):
            if changed:
                raise InvalidRequestError(f"{name} cannot be combined with beam search", name)

    @property
    def num_sequences(self) -> int:
        """How many choices come out of the engine for the request."""
        return self.n if self.best_of is None or self.use_beam_search else self.best_of

    @property
    def beam_width(self) -> int:
        """How many beams a search keeps."""
        return self.n if self.best_of is None else self.best_of

    def num_beam_candidates(self, eos_token_ids: Collection[int]) -> int:
        """How many continuations a search looks at: enough that all beams go on whatever ends."""
        ends = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        return max(2, 1 + len(ends)) * self.beam_width

    @property
    def needs_whole_prompt(self) -> bool:
        """True when every prompt position has to be computed, so that no cached block may serve."""
        return self.prompt_logprobs is not None or self.pooling in (Pooling.MEAN, Pooling.CLS)

    @property
    def greedy(self) -> bool:
        """True when the highest logit is taken (lowest id on a tie)."""
        return self.temperature == 0.0 or self.top_p == 0.0


def _check_range(name: str, value: float, low: float, high: float | None) -> None:
    if not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number", name)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} must be {bounds}, got {value}", name)
