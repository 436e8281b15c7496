"""A device on the CPU that does nothing before somebody waits, and records graphs for real.

What was submitted runs as late as it can. So work that reads host state which changes meanwhile,
a buffer that is filled again too early, and results that are read too early all show. A recorded
graph repeats the same operations on the same memory, whatever the host thinks by then, and refuses
to be recorded where the host would have to wait for the device.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.engine.worker.device_stream import Slot, StagingSlots


class Recorder(TorchDispatchMode):
    """Notes each operation with its tensors, as a CUDA graph does with kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "local_scalar_dense" not in str(func), "the host waits for a result in a recording"
        assert "nonzero" not in str(func), "a shape depends on a result in a recording"
        out = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.calls.append((func, args, kwargs or {}, leaves))
        return out

    def replay(self) -> None:
        for func, args, kwargs, leaves in self.calls:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs))]
            for kept, new in zip(leaves, (x for x in again if isinstance(x, Tensor)), strict=True):
                if kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


class FakeDownload:
    def __init__(self, stream: "FakeStream") -> None:
        self.stream = stream
        self.arrays: list[NDArray[Any]] | None = None

    def wait(self) -> list[NDArray[Any]]:
        self.stream.run(until=lambda: self.arrays is not None)
        assert self.arrays is not None
        return self.arrays


class FakeEvent:
    def __init__(self, stream: "FakeStream") -> None:
        self.stream = stream
        self.happened = True

    def synchronize(self) -> None:
        self.stream.run(until=lambda: self.happened)


class FakePool:
    """As in CUDA's allocator it dies with the last of its recordings."""

    def __init__(self) -> None:
        self.is_used = False
        self.recordings: WeakSet[Recorder] = WeakSet()


class FakeStream:
    """`num_done` counts what was done, when the host waited; `num_replays` the graphs that ran."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.queue: deque[Callable[[], None]] = deque()
        self.num_done = 0
        self.num_replays = 0
        self.num_uploads = 0
        self.num_slots = 0
        self._staging = StagingSlots(self._new_slot)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.queue and not until():
            with torch.inference_mode():
                self.queue.popleft()()
            self.num_done += 1

    def upload(self, words: NDArray[np.int64], into: Tensor) -> Tensor:
        self.num_uploads += 1
        size, slot = words.size, self._staging.fill(words)
        slot.copied.happened = False
        words[:] = -(2**40)  # it is the caller's again
        target = into[: words.size]
        if target.shape[0] < words.size:
            target = torch.empty(words.size, dtype=torch.int64)

        def copy() -> None:
            target.copy_(slot.buffer[:size])
            slot.copied.happened = True

        self.queue.append(copy)
        return target

    def _new_slot(self, size: int) -> Slot:
        self.num_slots += 1
        return Slot(torch.zeros(size, dtype=torch.int64), FakeEvent(self))

    def submit(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def download(self, sources: Callable[[], Sequence[Tensor]]) -> FakeDownload:
        result = FakeDownload(self)

        def copy() -> None:
            result.arrays = [tensor.numpy().copy() for tensor in sources()]

        self.queue.append(copy)
        return result

    def new_pool(self) -> FakePool:
        return FakePool()

    def capture(self, work: Callable[[], None], pool: FakePool) -> Callable[[], None]:
        assert pool.recordings or not pool.is_used, "the pool went with its recordings"
        self.run()
        with Recorder() as recorder:
            work()
        pool.is_used = True
        pool.recordings.add(recorder)

        def replay() -> None:
            self.num_replays += 1
            recorder.replay()

        return replay

    def synchronize(self) -> None:
        self.run()
