"""Memory for weights: large pages, so that reading them does not wait for address lookups."""

import contextlib
import mmap
import threading

import torch
from torch import Tensor

_ARENA_BYTES = 64 << 20
_ALIGNMENT = 64


class WeightMemory:
    """Hands out parts of large areas one after the other.

    An area goes back to the system when all tensors in it are gone. Most weights of a small
    model are shorter than one large page, hence the areas.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._area = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor that is not filled, its first byte at the start of a cache line."""
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            if self._used + count > self._area.numel():
                self._area, self._used = _large_pages(max(count, _ARENA_BYTES)), 0
            part = self._area[self._used : self._used + count]
            self._used += -(-count // _ALIGNMENT) * _ALIGNMENT
        return part.view(dtype).view(shape)


def _large_pages(count: int) -> Tensor:
    area = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


weight_memory = WeightMemory()
