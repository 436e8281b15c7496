"""Where the memory of a GPU goes, measured before the cache is sized."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

_GIB = 1024**3


class DeviceMemory(Protocol):
    """What can be asked about the memory of a device; all in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """What the driver has left, and what there is."""

    def allocated(self) -> int:
        """Held by tensors."""

    def peak(self) -> int:
        """Most that was held by tensors since `release`."""

    def reserved(self) -> int:
        """Taken from the driver by this process, for tensors to come too."""

    def release(self) -> None:
        """Gives back what no tensor holds, and lets `peak` start anew."""


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        """See `DeviceMemory`."""
        return torch.cuda.mem_get_info(self._device)

    def allocated(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reserved(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_reserved(self._device)

    def release(self) -> None:
        """See `DeviceMemory`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(frozen=True, slots=True)
class MemorySum:
    """What takes the memory beside the cache; all in bytes.

    others       other processes, and what the driver keeps for this one
    weights      the model
    activations  the largest step, beyond all others here
    rows         what is kept of each sequence beside the cache: block tables, counts of tokens
    graphs       recorded decode steps, with their buffers
    """

    total: int
    others: int
    weights: int
    activations: int
    rows: int
    graphs: int

    @property
    def taken(self) -> int:
        """All but the cache."""
        return self.others + self.weights + self.activations + self.rows + self.graphs

    def cache_budget(self, utilization: float) -> int:
        """What the cache may take of a share of the memory; negative where that is too little."""
        return int(self.total * utilization) - self.taken

    def utilization_for(self, cache_bytes: int) -> float:
        """The smallest share, in hundredths, that leaves so much for the cache; it may pass 1."""
        return math.ceil((self.taken + cache_bytes) / self.total * 100) / 100

    def advice(self, cache_bytes: int) -> str:
        """Which flag and value leave so much for the cache."""
        share = self.utilization_for(cache_bytes)
        if share <= 1:
            return f"--gpu-memory-utilization {share:.2f} would do"
        if self.graphs and self.utilization_for(cache_bytes - self.graphs) <= 1:
            return "--gpu-memory-utilization 1.00 with --enforce-eager would do"
        missing = (self.taken + cache_bytes - self.total) / _GIB
        return (
            f"{missing:.2f} GiB are missing on this GPU even with --gpu-memory-utilization 1.00; "
            "a smaller --max-num-batched-tokens or --max-num-seqs needs less, a smaller model far "
            "less"
        )

    def describe(self, cache_bytes: int, utilization: float) -> str:
        """The sum, for people."""
        parts = {
            "other programs and driver": self.others,
            "weights": self.weights,
            "largest step": self.activations,
            "rows of sequences": self.rows,
            "recorded decode steps": self.graphs,
            "KV cache": cache_bytes,
            "left free": self.total - self.taken - cache_bytes,
        }
        listed = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
        return (
            f"GPU memory {self.total / _GIB:.2f} GiB: {listed} "
            f"(--gpu-memory-utilization {utilization:g})"
        )
