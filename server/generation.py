"""From validated fields to the engine's parameters; shared by all routes that generate."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ContextLengthError, InvalidRequestError
from octavo.engine.core.sampling_params import SamplingParams
from octavo.server.protocol.common import GenerationBody
from octavo.server.served_model import ServedModel

# The tokenizers of encoders drop spaces and write a long word as one token, so a token has no
# longest text. Beyond this mean a text is taken to be no text.
_ENCODER_TOKEN_CHARS = 256

MAX_TRUNCATED_CHARS = 1_000_000
"""Of a text, or of all texts of a request, that are tokenized only to be truncated."""

SYSTEM_FINGERPRINT = "fp_octavo"
"""Sent with every answer; the same as long as the server's behaviour is."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is the same in the plain answer and in all chunks of one HTTP request."""

    model: str
    prefix: str
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.prefix}-{uuid.uuid4().hex}")

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the leading fields of an object of this `kind`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """How many tokens a request asks for.

    `explicit` is the client's number. Without one it is `default`, or with neither as many as
    fit. `param` is the field at fault when the prompt alone is too long.
    """

    explicit: int | None
    default: int | None
    param: str

    def resolve(self, num_prompt_tokens: int, max_model_len: int, clamp: bool) -> int:
        """Return max_tokens. Raises ContextLengthError; `clamp` cuts an explicit number."""
        room = max_model_len - num_prompt_tokens
        smallest = 0 if self.explicit == 0 else 1
        if room < smallest:
            raise self._too_long(num_prompt_tokens, max_model_len)
        if self.explicit is None:
            return room if self.default is None else min(self.default, room)
        if self.explicit > room and not clamp:
            raise self._too_long(num_prompt_tokens, max_model_len)
        return min(self.explicit, room)

    def _too_long(self, num_prompt_tokens: int, max_model_len: int) -> ContextLengthError:
        room = max(max_model_len - num_prompt_tokens, 0)
        return ContextLengthError(
            f"The context holds at most {max_model_len} tokens, prompt and answer together. "
            f"The prompt has {num_prompt_tokens} tokens, so the largest max_tokens that fits "
            f"is {room}",
            self.param,
        )


def check_settings(
    body: GenerationBody, model: ServedModel, config: ServerConfig, priority_scheduling: bool
) -> None:
    """Check what depends on the model and the server. Raises InvalidRequestError."""
    if not model.generates:
        raise InvalidRequestError(
            f"The model `{model.name}` makes embeddings only; use /v1/embeddings", "model"
        )
    for name, ids in (
        ("logit_bias", body.logit_bias),
        ("stop_token_ids", body.stop_token_ids),
        ("allowed_token_ids", body.allowed_token_ids),
    ):
        if ids and max(ids) >= model.vocab_size:
            raise InvalidRequestError(
                f"`{name}` must hold token ids from 0 to {model.vocab_size - 1}", name
            )
    check_num_logprobs("prompt_logprobs", body.prompt_logprobs, config)
    if body.priority != 0 and not priority_scheduling:
        raise InvalidRequestError(
            "`priority` needs a server with --scheduling-policy priority", "priority"
        )


def check_num_logprobs(name: str, value: int | None, config: ServerConfig) -> None:
    """Raise InvalidRequestError for more alternatives than the server gives."""
    if value is not None and value > config.max_logprobs:
        raise InvalidRequestError(f"`{name}` must be at most {config.max_logprobs}", name)


def truncate_prompt(
    token_ids: list[int], body: GenerationBody, wanted: WantedTokens, max_model_len: int
) -> list[int]:
    """Return what `truncate_prompt_tokens` leaves of a prompt."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return token_ids
    if limit == -1:
        answer = wanted.default if wanted.explicit is None else wanted.explicit
        # One token of the prompt always stays: whether it fits is the context check's affair.
        limit = max(max_model_len - (1 if answer is None else answer), 1)
    return token_ids[-limit:] if body.truncation_side == "left" else token_ids[:limit]


def longest_first(prompts: Sequence[str | list[int]]) -> list[int]:
    """Numbers of `prompts`: one that is too long is found before the others are tokenized."""
    return sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))


class PromptEncoder:
    """Tokenizes texts that could fit; slow, so not for the event loop."""

    def __init__(self, model: ServedModel) -> None:
        self._tokenizer = model.tokenizer
        self._max_model_len = model.max_model_len
        self._longest = model.tokenizer.longest_piece if model.generates else _ENCODER_TOKEN_CHARS

    def encode(
        self, text: str, add_special_tokens: bool, param: str, truncated: bool = False
    ) -> list[int]:
        """Return the ids of `text`.

        Raises ContextLengthError at once for a text that no sequence of tokens within the context
        can spell: tokenizing megabytes takes many seconds. One that will be `truncated` may be
        longer, up to a million characters.
        """
        fewest = len(text) // self._longest
        may_be_long = truncated and len(text) <= MAX_TRUNCATED_CHARS
        if fewest > self._max_model_len and not may_be_long:
            raise ContextLengthError(
                f"The context holds at most {self._max_model_len} tokens, prompt and answer "
                f"together. The prompt has more than {fewest} tokens, so the largest max_tokens "
                "that fits is 0",
                param,
            )
        return self._tokenizer.encode(text, add_special_tokens)

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of each word, at the start of a text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip(" ")):
                token_ids = tuple(self.encode(text, False, "bad_words"))
                if token_ids:
                    sequences[token_ids] = None
        return tuple(sequences)


@dataclass(frozen=True, slots=True)
class RouteParams:
    """The parameters that the routes name or resolve differently; see SamplingParams."""

    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


def sampling_params(
    body: GenerationBody, model: ServedModel, max_tokens: int, route: RouteParams
) -> SamplingParams:
    """Return the engine's parameters. Raises InvalidRequestError.

    A field that the client left out takes the checkpoint's default, then the API's.
    """
    sampling = _search_params(body) if body.use_beam_search else _draw_params(body, model)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_min_tokens(body, max_tokens),
        n=body.n,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=body.seed,
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        logit_bias=body.logit_bias or {},
        allowed_token_ids=(
            None if body.allowed_token_ids is None else tuple(dict.fromkeys(body.allowed_token_ids))
        ),
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        best_of=route.best_of,
        logprobs=route.logprobs,
        prompt_logprobs=route.prompt_logprobs,
        bad_words_token_ids=route.bad_words_token_ids,
        **{name: value for name, value in sampling.items() if value is not None},
    )


def _draw_params(body: GenerationBody, model: ServedModel) -> dict[str, Any]:
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
    }
    return {
        name: model.default_sampling_params.get(name) if value is None else value
        for name, value in given.items()
    }


def _search_params(body: GenerationBody) -> dict[str, Any]:
    # A penalty among the checkpoint's defaults is meant for draws; only the client's is refused.
    return {
        "use_beam_search": True,
        "length_penalty": body.length_penalty,
        "early_stopping": body.early_stopping,
        "repetition_penalty": body.repetition_penalty,
    }


def _min_tokens(body: GenerationBody, max_tokens: int) -> int:
    if body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"`min_tokens` must not be above max_tokens, which is {max_tokens}", "min_tokens"
        )
    return body.min_tokens
