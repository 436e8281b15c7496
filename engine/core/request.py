"""Request and Sequence: what a client asked for, and each token list generated for it."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import StrEnum

from octavo.engine.core.sampling_params import SamplingParams

UNKNOWN_TOKEN = -1
"""Stands for an id that a running step draws, while the next step is planned."""


class SequenceStatus(StrEnum):
    """Where a sequence stands; `_LEGAL_MOVES` lists the moves."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended. The first two are seen by clients."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_LEGAL_MOVES = {
    (SequenceStatus.WAITING, SequenceStatus.RUNNING),
    (SequenceStatus.RUNNING, SequenceStatus.WAITING),
    (SequenceStatus.RUNNING, SequenceStatus.SWAPPED),
    (SequenceStatus.SWAPPED, SequenceStatus.RUNNING),
    (SequenceStatus.SWAPPED, SequenceStatus.FINISHED),
    (SequenceStatus.WAITING, SequenceStatus.FINISHED),
    (SequenceStatus.RUNNING, SequenceStatus.FINISHED),
}


class Sequence:
    """One token list being generated. Only the scheduler changes it.

    `num_computed_tokens` is the number of leading tokens whose K and V are in the cache. A step
    lets it catch up with `num_tokens`; prefill, chunks, hits, resume and decode are all this.
    """

    __slots__ = (
        "_token_ids",
        "finish_reason",
        "index",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "request",
        "seq_id",
        "status",
        "stop_reason",
    )

    def __init__(
        self, seq_id: int, request: "Request", index: int, token_ids: SequenceOf[int]
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self._token_ids = list(token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None

    @property
    def token_ids(self) -> SequenceOf[int]:
        """Prompt and generated ids, in order; a view, not to be changed."""
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self._token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self._token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        """True once the sequence has ended."""
        return self.status is SequenceStatus.FINISHED

    def append_tokens(self, token_ids: SequenceOf[int]) -> None:
        """Add sampled ids, the first in the place of an unknown one if there is one."""
        if self._token_ids[-1] == UNKNOWN_TOKEN:
            self._token_ids.pop()
        self._token_ids.extend(token_ids)

    def append_unknown(self) -> None:
        """Add one id that is not known yet; `append_tokens` settles it."""
        self._token_ids.append(UNKNOWN_TOKEN)

    def advance(self, num_tokens: int) -> None:
        """Record that `num_tokens` more tokens have their K and V in the cache."""
        self.num_computed_tokens += num_tokens
        assert self.num_computed_tokens <= self.num_tokens

    def run(self) -> None:
        """WAITING or SWAPPED -> RUNNING."""
        self._move(SequenceStatus.RUNNING)

    def preempt(self) -> None:
        """RUNNING -> WAITING; the tokens stay, their K and V are given up."""
        self._move(SequenceStatus.WAITING)
        self.num_computed_tokens = 0

    def swap_out(self) -> None:
        """RUNNING -> SWAPPED; the K and V of its tokens wait in host memory."""
        self._move(SequenceStatus.SWAPPED)

    def finish(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """End the sequence. `stop_reason` is the client's stop id that matched, if one did."""
        self._move(SequenceStatus.FINISHED)
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def _move(self, status: SequenceStatus) -> None:
        assert (self.status, status) in _LEGAL_MOVES, (self.seq_id, self.status, status)
        self.status = status


@dataclass(slots=True, eq=False)
class Request:
    """What a client asked for one prompt.

    `seed` is always set: the client's own, or one that the engine drew. `number` is its place in
    the order of arrival, given by the scheduler.
    `arrival_time` and `scheduled_time` (when it first ran) are `time.monotonic()` seconds.
    `sequences` are those that have begun and not ended. `open_choices` are the indices whose
    terminal delta is still to come.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    number: int = 0
    scheduled_time: float | None = None
    sequences: list[Sequence] = field(default_factory=list)
    open_choices: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.open_choices = set(range(self.params.num_sequences))

    @property
    def finished(self) -> bool:
        """True once the terminal delta of every choice has been handed out."""
        return not self.open_choices

    @property
    def unborn_choices(self) -> list[int]:
        """Open choices that have no sequence yet: those before the fork.

        None in a beam search, whose sequences are no choices.
        """
        if self.params.use_beam_search or len(self.sequences) == len(self.open_choices):
            return []
        return sorted(self.open_choices - {sequence.index for sequence in self.sequences})
