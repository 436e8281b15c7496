"""The tensors of the paged KV cache."""

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from octavo.engine.attention.metadata import NO_SCALES, CacheScales, KVCacheLayout, LayerKVCache
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.worker.host_copies import to_device
from octavo.engine.worker.page_supply import PageSupply
from octavo.kernels import ops

_ALIGNMENT = 64
# How far past the last row kernels of a CPU may read, where a head fills no whole vectors: they
# read the null block too, which stands for blocks that have left a window.
_READ_PAST = 128
# What is asked of the system before it is needed, lest a small machine be filled for nothing.
_SUPPLIED_BYTES = 1 << 30
_SUPPLIED_SHARE = 0.25


class KVCache:
    """Keys and values of all layers; `layers` is what a forward pass reads and writes.

    `num_host_blocks` more blocks are in host memory, pinned for a GPU, to copy to and from.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        num_layers: int,
        device: torch.device,
        num_host_blocks: int = 0,
        scales: Sequence[CacheScales] | None = None,
    ) -> None:
        """`scales` are those of each layer, for a cache that is smaller than the activations.

        Raises ConfigurationError when the memory cannot be had.
        """
        self.layout = layout
        self._device = device
        of_layers = scales or [NO_SCALES] * num_layers
        try:
            self.layers = tuple(
                LayerKVCache(_zeros(layout, device), _zeros(layout, device), *pair)
                for pair in of_layers
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            total = layout.bytes_per_block * num_layers * (layout.num_blocks + 1)
            raise ConfigurationError(
                f"the KV cache of {layout.num_blocks} blocks needs {total} bytes, which cannot be "
                "allocated; give a smaller --kv-cache-memory-bytes or --num-gpu-blocks-override"
            ) from error

        host_layout = replace(layout, num_blocks=num_host_blocks)
        self.num_host_blocks = num_host_blocks
        try:
            self._host_layers = self._make_host_layers(host_layout, num_layers)
        except (MemoryError, OSError, RuntimeError) as error:
            total = layout.bytes_per_block * num_layers * num_host_blocks
            raise ConfigurationError(
                f"{total} bytes of host memory for swapped and offloaded blocks cannot be "
                "allocated; give a smaller --swap-space or --kv-offload"
            ) from error

    def page_supply(self) -> PageSupply | None:
        """For the blocks that are used first, on a CPU; None on a GPU."""
        if self._device.type != "cpu":
            return None
        tensors = [tensor for layer in self.layers for tensor in (layer.key, layer.value)]
        budget = min(_SUPPLIED_BYTES, _SUPPLIED_SHARE * sum(tensor.nbytes for tensor in tensors))
        block_bytes = self.layout.bytes_per_block * len(self.layers)
        return PageSupply(tensors, int(budget // block_bytes))

    def _make_host_layers(self, layout: KVCacheLayout, num_layers: int) -> tuple[LayerKVCache, ...]:
        if not self.num_host_blocks:
            return ()
        if self._device.type == "cpu":
            tensors = [_zeros(layout, self._device) for _ in range(2 * num_layers)]
        else:
            tensors = self._pinned_zeros(layout, 2 * num_layers)
        return tuple(map(LayerKVCache, tensors[::2], tensors[1::2]))

    def _pinned_zeros(self, layout: KVCacheLayout, count: int) -> list[Tensor]:
        """So many tensors in host memory that is locked, in one piece, for the life of the cache.

        torch's own pinned memory comes in powers of two, up to twice what was asked for.
        """
        size = prod(layout.shape) * layout.dtype.itemsize
        padded = size + -size % _ALIGNMENT
        flat = torch.frombuffer(mmap.mmap(-1, count * padded), dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
        if error:
            raise RuntimeError(f"host memory cannot be pinned: CUDA error {error}")
        weakref.finalize(self, runtime.cudaHostUnregister, flat.data_ptr())
        parts = flat.view(count, padded)[:, :size].unbind()
        return [part.view(layout.dtype).view(layout.shape) for part in parts]

    def move_blocks(self, plan: SchedulerOutput) -> None:
        """The copies of a step, in the order that they ask for."""
        self.swap_out(plan.swap_out)
        self.swap_in(plan.swap_in)
        self.copy_blocks(plan.block_copies)

    def swap_out(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (source, destination) to host memory, in every layer."""
        self._swap(self.layers, self._host_layers, copies)

    def swap_in(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (source, destination) back from host memory, in every layer."""
        self._swap(self._host_layers, self.layers, copies)

    def _swap(
        self,
        sources: Sequence[LayerKVCache],
        targets: Sequence[LayerKVCache],
        copies: Sequence[tuple[int, int]],
    ) -> None:
        # On a GPU the copies run in the order of its stream, and only the stream touches the blocks
        # in pinned memory, so nobody has to wait for them.
        if not copies:
            return
        origins, destinations = self._pairs(copies)
        for source, target in zip(sources, targets, strict=True):
            ops.swap_blocks(source.key, target.key, origins, destinations)
            ops.swap_blocks(source.value, target.value, origins, destinations)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (source, destination) in every layer; all reads come before all writes."""
        if not copies:
            return
        source, destination = self._pairs(copies)
        for layer in self.layers:
            ops.copy_blocks(layer.key, layer.value, source, destination)

    def _pairs(self, copies: Sequence[tuple[int, int]]) -> Tensor:
        """int64 [2, n] on the device: sources, then destinations."""
        pairs = torch.tensor(copies, dtype=torch.int64).T.contiguous()
        return to_device(pairs, self._device)


def _zeros(layout: KVCacheLayout, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(layout.shape, dtype=layout.dtype, device=device)
    # numpy's zeros come from the system page by page as they are written; torch would write them
    # all now and so take the memory of a cache that may never fill.
    size = prod(layout.shape) * layout.dtype.itemsize
    buffer = np.zeros(_ALIGNMENT + size + _READ_PAST, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    flat = torch.from_numpy(buffer)[start : start + size]
    return flat.view(layout.dtype).view(layout.shape)
