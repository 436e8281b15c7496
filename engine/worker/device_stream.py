"""The narrow door to a device that works on its own while the host goes on.

All that the runner asks of CUDA goes through here, so that a stand-in can take its place.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Work = Callable[[], None]

_SLOTS = 3
"""Pinned buffers in rotation: one is filled while the device may still read the two before."""

_KEPT_DOWNLOADS = 4
"""More than are under way at a time."""


class Download(Protocol):
    """Results on their way to the host."""

    def wait(self) -> list[NDArray[Any]]:
        """The arrays, once all work that was submitted before has been done."""


class DeviceStream(Protocol):
    """Work is done in the order in which it was handed over, and nothing here waits for it."""

    device: torch.device

    def upload(self, words: NDArray[np.int64], into: Tensor) -> Tensor:
        """Copies `words` to the device: into the front of `into`, or where they are too many into
        memory of their own. `words` may be changed once this returns."""

    def submit(self, work: Work) -> None:
        """Lets the device do `work`, which must not wait for it and reads no host state that
        changes later."""

    def download(self, sources: Callable[[], Sequence[Tensor]]) -> Download:
        """Copies tensors to the host; the device calls `sources` when their turn has come."""

    def new_pool(self) -> Any:  # noqa: ANN401
        """Memory that recordings share, which run one after the other; good for as long as one of
        them is there, and then no more."""

    def capture(self, work: Work, pool: Any) -> Work:  # noqa: ANN401
        """Records `work` and returns what repeats it: the same kernels on the same memory."""

    def synchronize(self) -> None:
        """Waits until everything has been done."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A buffer int64 of the host, and an event after which the device no longer reads it."""

    buffer: Tensor
    copied: Any


class StagingSlots:
    """Buffers in rotation, so that the host fills one while the device may read the others.

    `new_slot` makes a slot of at least so many words, whose event has happened.
    """

    def __init__(self, new_slot: Callable[[int], Slot]) -> None:
        self._new_slot = new_slot
        self._slots = [new_slot(1) for _ in range(_SLOTS)]
        self._next = 0

    def fill(self, words: NDArray[np.int64]) -> Slot:
        """Copies `words` to the front of the next slot; waits only where it is still being read."""
        slot = self._slots[self._next]
        slot.copied.synchronize()
        if slot.buffer.shape[0] < words.size:
            # Doubled, so that growing steps do not ask for new memory each time.
            slot = self._slots[self._next] = self._new_slot(2 * words.size)
        self._next = (self._next + 1) % _SLOTS
        slot.buffer.numpy()[: words.size] = words
        return slot


class _CudaDownload:
    def __init__(self, copies: list[Tensor], done: Any) -> None:  # noqa: ANN401
        self._copies = copies
        self._done = done

    def wait(self) -> list[NDArray[Any]]:
        self._done.synchronize()
        return [copy.numpy() for copy in self._copies]


class CudaStream:
    """Kernels on torch's current stream, results on a stream beside it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging = StagingSlots(_pinned_slot)
        # To free pinned memory asks the device, and where that is lost it ends the process, before
        # anybody is told. So the last results go when new ones come.
        self._kept: deque[list[Tensor]] = deque(maxlen=_KEPT_DOWNLOADS)

    def upload(self, words: NDArray[np.int64], into: Tensor) -> Tensor:
        """See `DeviceStream`; waits only where all buffers are still being read."""
        slot = self._staging.fill(words)
        target = into[: words.size]
        if target.shape[0] < words.size:
            target = torch.empty(words.size, dtype=torch.int64, device=self.device)
        target.copy_(slot.buffer[: words.size], non_blocking=True)
        slot.copied.record()
        return target

    def submit(self, work: Work) -> None:
        """See `DeviceStream`: the kernels are queued at once."""
        work()

    def download(self, sources: Callable[[], Sequence[Tensor]]) -> Download:
        """See `DeviceStream`. What is copied must not be overwritten by work that follows."""
        tensors = sources()
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        copies = []
        with torch.cuda.stream(self._copy_stream):
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copy.copy_(tensor, non_blocking=True)
                # Its memory must not be given to others before the copy has been made.
                tensor.record_stream(self._copy_stream)
                copies.append(copy)
            # Blocking: a host that spins would take a core from the event loop.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._copy_stream)
        self._kept.append(copies)
        return _CudaDownload(copies, done)

    def new_pool(self) -> Any:  # noqa: ANN401
        """See `DeviceStream`. torch refuses a pool whose graphs are gone while anything is left in
        it, and the workspace of a matrix product, made in the first recording, stays for ever."""
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Work, pool: Any) -> Work:  # noqa: ANN401
        """See `DeviceStream`; the graphs of a pool cost the memory of the largest, which should
        come first."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those that tokenize, may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        replay: Work = graph.replay
        return replay

    def synchronize(self) -> None:
        """See `DeviceStream`."""
        torch.cuda.synchronize(self.device)


def _pinned_slot(size: int) -> Slot:
    buffer = torch.empty(size, dtype=torch.int64, pin_memory=True)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return Slot(buffer, event)
