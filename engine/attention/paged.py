"""The attention of one layer over the paged cache."""

from torch import Tensor

from octavo.engine.attention.metadata import AttentionMetadata, LayerKVCache
from octavo.kernels import ops
from octavo.kernels.rotary_args import HeadNorm, Rotation


class PagedAttention:
    """Stores the keys and values of a step and attends over all that its sequences have.

    `window` is the sliding window in tokens, the token itself included, or None.
    """

    def __init__(self, head_dim: int, window: int | None) -> None:
        self.scale: float = head_dim**-0.5
        self.window = window

    def __call__(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        norm: HeadNorm | None,
        rotation: Rotation,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """`heads` are q [T, Hq, D], k and v [T, Hkv, D], not yet rotated -> [T, Hq, D]."""
        q = ops.rotate_and_cache(*heads, norm, rotation, cache, metadata.slot_mapping)
        return ops.scaled_paged_attention(q, cache, metadata, self.scale, self.window)
