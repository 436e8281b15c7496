"""The key/value cache of one layer, as the kernels see it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Both tensors of a layer, and the scales of a cache that is smaller than the activations.

    key, value              [blocks, Hkv, block_size, D]; the dtype of the queries, or e4m3
    key_scale, value_scale  float32 [Hkv]; the stored number times the scale is meant. None is 1
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
