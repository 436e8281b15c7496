"""What the machine can do at best, measured: figures of kernels mean something beside these only.

bandwidth GB/s = 1e9 bytes per second   compute GFLOP/s = 1e9 multiplications and additions per s
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Far above the last cache of today's processors, and above the L2 of GPUs.
_BUFFER_BYTES = 1 << 27
_CPU_MATMUL, _GPU_MATMUL = 1024, 8192
_REPETITIONS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best of several runs with `threads` threads (a GPU: 1).

    `copy_gb` counts bytes read and written. `matmul_dtype` is the faster of float32 and the dtype
    that was asked for.
    """

    threads: int
    read_gb: float
    copy_gb: float
    matmul_gflops: float
    matmul_dtype: str

    @property
    def bandwidth_gb(self) -> float:
        """The larger of the two bandwidths: no kernel can be above it for long."""
        return max(self.read_gb, self.copy_gb)

    def render(self) -> str:
        """One line for people."""
        return (
            f"ceilings ({self.threads} threads): read {self.read_gb:.1f} GB/s, "
            f"copy {self.copy_gb:.1f} GB/s, "
            f"matmul {self.matmul_gflops:,.0f} GFLOP/s ({self.matmul_dtype})"
        )


def measure_ceilings(dtype: torch.dtype, device: torch.device, num_threads: int) -> Ceilings:
    """Measure torch's copy, sum and matrix product on `device`."""
    with _torch_threads(num_threads):
        read, copy = _bandwidths(device)
        rates = {
            str(kind).removeprefix("torch."): _matmul_rate(kind, device)
            for kind in {torch.float32, dtype}
        }
    best = max(rates, key=lambda name: rates[name])
    threads = num_threads if device.type == "cpu" else 1
    return Ceilings(threads, read, copy, rates[best], best)


def best_seconds(work: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """The shortest of several runs; one more before them is not counted."""
    shortest = float("inf")
    for number in range(repetitions + 1):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        if number:
            shortest = min(shortest, time.perf_counter() - begin)
    return shortest


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _bandwidths(device: torch.device) -> tuple[float, float]:
    source = torch.ones(_BUFFER_BYTES // 4, device=device)
    target = torch.empty_like(source)
    read = best_seconds(source.sum, device, _REPETITIONS)
    copy = best_seconds(lambda: target.copy_(source), device, _REPETITIONS)
    return _BUFFER_BYTES / read / 1e9, 2 * _BUFFER_BYTES / copy / 1e9


def _matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    size = _CPU_MATMUL if device.type == "cpu" else _GPU_MATMUL
    left = torch.full((size, size), 0.5, dtype=dtype, device=device)
    right = torch.full((size, size), 0.25, dtype=dtype, device=device)
    seconds = best_seconds(lambda: left @ right, device, _REPETITIONS)
    return 2 * size**3 / seconds / 1e9
