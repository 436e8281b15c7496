"""The tensors of the paged KV cache."""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from octavo.engine.attention.metadata import KVCacheLayout, LayerKVCache
from octavo.engine.core.errors import ConfigurationError
from octavo.kernels import ops

_ALIGNMENT = 64


class KVCache:
    """Keys and values of all layers; `layers` is what a forward pass reads and writes."""

    def __init__(self, layout: KVCacheLayout, num_layers: int, device: torch.device) -> None:
        """Raises ConfigurationError when the memory cannot be had."""
        self.layout = layout
        self._device = device
        try:
            self.layers = tuple(
                LayerKVCache(_zeros(layout, device), _zeros(layout, device))
                for _ in range(num_layers)
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            total = layout.bytes_per_block * num_layers * (layout.num_blocks + 1)
            raise ConfigurationError(
                f"the KV cache of {layout.num_blocks} blocks needs {total} bytes, which cannot be "
                "allocated; give a smaller --kv-cache-memory-bytes or --num-gpu-blocks-override"
            ) from error

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (source, destination) in every layer; all reads come before all writes."""
        if not copies:
            return
        source, destination = torch.tensor(copies, dtype=torch.int64, device=self._device).T
        for layer in self.layers:
            ops.copy_blocks(layer.key, layer.value, source, destination)


def _zeros(layout: KVCacheLayout, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(layout.shape, dtype=layout.dtype, device=device)
    # numpy's zeros come from the system page by page as they are written; torch would write them
    # all now and so take the memory of a cache that may never fill.
    size = prod(layout.shape) * layout.dtype.itemsize
    buffer = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return torch.from_numpy(buffer[start : start + size]).view(layout.dtype).view(layout.shape)
