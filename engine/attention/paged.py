"""The attention of one layer over the paged cache."""

from torch import Tensor

from octavo.engine.attention.metadata import AttentionMetadata, LayerKVCache
from octavo.kernels import ops


class PagedAttention:
    """Stores the keys and values of a step and attends over all that its sequences have.

    `window` is the sliding window in tokens, the token itself included, or None.
    """

    def __init__(self, head_dim: int, window: int | None) -> None:
        self.scale: float = head_dim**-0.5
        self.window = window

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        ops.write_kv_cache(k, v, cache.key, cache.value, metadata.slot_mapping)
        return ops.paged_attention(q, cache.key, cache.value, metadata, self.scale, self.window)
