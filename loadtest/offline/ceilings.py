"""What the machine can do at best, measured: figures of kernels mean something beside these only.

bandwidth GB/s = 1e9 bytes per second   compute GFLOP/s = 1e9 multiplications and additions per s
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from octavo.loadtest.offline.clock import best_seconds

# Far above the last cache of today's processors, and of GPUs.
_BUFFER_BYTES, _GPU_BUFFER_BYTES = 1 << 27, 1 << 31
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


@contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _bandwidths(device: torch.device) -> tuple[float, float]:
    size = _BUFFER_BYTES if device.type == "cpu" else _GPU_BUFFER_BYTES
    # Random: zeros would draw less power, and a GPU would run faster.
    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)
    read = best_seconds(source.sum, device, _REPETITIONS)
    copy = best_seconds(lambda: target.copy_(source), device, _REPETITIONS)
    return size / read / 1e9, 2 * size / copy / 1e9


def _matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    size = _CPU_MATMUL if device.type == "cpu" else _GPU_MATMUL
    left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    seconds = best_seconds(lambda: left @ right, device, _REPETITIONS)
    return 2 * size**3 / seconds / 1e9
