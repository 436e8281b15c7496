"""Pages of the KV cache, had from the system before a step writes them."""

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence

from torch import Tensor

_PIECE_BYTES = 2 << 20
_POPULATE_WRITE = 23  # madvise(2), from Linux 5.14 on


class PageSupply:
    """Has the system give the pages of the first blocks of a cache, a piece at a time.

    A page that is first touched by a step lets that step wait while the system finds and clears
    it, on some virtual machines for ten microseconds.
    """

    def __init__(self, tensors: Sequence[Tensor], num_blocks: int) -> None:
        """Of each of `tensors` in host memory [blocks, ...] the first `num_blocks` blocks."""
        self._pieces = _pieces(tensors, num_blocks) if sys.platform == "linux" else iter(())

    def supply(self) -> bool:
        """Takes about a millisecond, as a rule; False when there is nothing left to do."""
        piece = next(self._pieces, None)
        if piece is None:
            return False
        address, count = ctypes.c_void_p(piece[0]), ctypes.c_size_t(piece[1])
        return int(ctypes.CDLL(None).madvise(address, count, _POPULATE_WRITE)) == 0


def _pieces(tensors: Sequence[Tensor], num_blocks: int) -> Iterator[tuple[int, int]]:
    """(address, bytes) of whole pages: for a number of blocks those of all tensors, and so on."""
    block_bytes = tensors[0][0].nbytes
    together = max(1, _PIECE_BYTES // block_bytes)
    for block in range(0, num_blocks, together):
        end = min(block + together, num_blocks)
        for tensor in tensors:
            first = tensor.data_ptr() + block * block_bytes
            start = first // mmap.PAGESIZE * mmap.PAGESIZE
            yield start, tensor.data_ptr() + end * block_bytes - start
