"""What other threads put into the inbox of the engine thread."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.engine.core.block_map import BlockMap
from octavo.engine.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class AddRequest:
    """One prompt to answer. `request_id` is unique among the open requests.

    `arrival_time` is a `time.monotonic()` second. `priority` counts under the priority policy
    only; lower goes first. Prefix blocks are shared only between equal `cache_salt`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End a request, or the one choice `index` of it. Unknown and finished ones are left alone."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all blocks kept for reuse; done only while no sequence holds a block.

    `reply` is called from the engine thread with whether it was done.
    """

    reply: Callable[[bool], None] | None = None


@dataclass(frozen=True, slots=True)
class TakeBlockMap:
    """Give a picture of the block pool to `reply`, in the engine thread.

    It is not called when the engine ends before.
    """

    reply: Callable[[BlockMap], None]


Message = AddRequest | AbortRequest | ResetPrefixCache | TakeBlockMap
