"""Memory that kernels use while they run, kept between calls."""

import threading

import torch
from torch import Tensor


class _Scratch(threading.local):
    """One growing buffer for each thread that calls kernels."""

    def __init__(self) -> None:
        self.buffer: Tensor = torch.empty(0, dtype=torch.uint8)
        self.size = 0
        self.address = 0


_scratch = _Scratch()


def scratch(size: int) -> int:
    """Address of at least `size` bytes that stay valid until this thread's next call."""
    if _scratch.size < size:
        _scratch.buffer = torch.empty(size, dtype=torch.uint8)
        _scratch.address = _scratch.buffer.data_ptr()
        _scratch.size = size
    return _scratch.address
