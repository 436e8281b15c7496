"""What leaves the engine thread after a step."""

from dataclasses import dataclass
from typing import NamedTuple

from octavo.engine.core.errors import RequestError
from octavo.engine.core.model_output import TokenLogprobs
from octavo.engine.core.pooling import Embedding
from octavo.engine.core.request import FinishReason


class SequenceDelta(NamedTuple):
    """New ids of one choice since its last delta.

    A named tuple, since one is made per sequence and step: a frozen dataclass of this size takes
    four times as long to make.

    `finish_reason` is set on the one terminal delta of the choice; nothing follows it.
    `stop_reason` is the client's stop id that matched. `error` is set with FinishReason.ERROR,
    and `refusal` too when the request itself was at fault.
    `num_cached_tokens` is the number of prompt tokens taken from the prefix cache.
    `scheduled_time` is the `time.monotonic()` second at which the request first ran; None before.
    `prompt_logprobs` arrives once, on the first delta of choice 0, where asked for.
    `embedding` is on the terminal delta of a request that asked for pooling.
    A choice of a beam search has one delta, with all its ids, the sum of their log-probabilities
    as `cumulative_logprob`, and its `score`; choice 0 is the best.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    scheduled_time: float | None = None
    embedding: Embedding | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    refusal: RequestError | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot taken by the engine thread after a step; counters only ever grow.

    `num_wasted_slots` are token slots of used blocks of `block_size` that hold no token (yet).
    `num_preemptions` counts sequences, in both modes. Blocks in swap space hold what preempted
    sequences had computed; `num_swapped_out_blocks` and `num_swapped_in_blocks` are counters of
    copies. `num_offload_hits` counts evicted blocks that came back from host memory.
    `num_integrity_errors` counts contradictions in the bookkeeping, looked for when idle.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    block_size: int = 1
    num_wasted_slots: int = 0
    num_preemptions: int = 0
    num_preemptions_by_swap: int = 0
    num_swap_blocks: int = 0
    num_used_swap_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_offload_blocks: int = 0
    num_used_offload_blocks: int = 0
    num_offload_hits: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_steps: int = 0
    last_step_tokens: int = 0
    num_integrity_errors: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that at least one sequence holds, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def kv_cache_waste(self) -> float:
        """Share of the token slots of used blocks that hold no token (yet), 0 to 1."""
        num_slots = self.num_used_blocks * self.block_size
        return self.num_wasted_slots / num_slots if num_slots else 0.0
