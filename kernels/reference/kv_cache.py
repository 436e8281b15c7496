"""Writes and copies within the paged cache."""

from torch import Tensor, uint8


def write_kv_cache(
    k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """See `octavo.kernels.ops.write_kv_cache`."""
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
    block_size = key_cache.shape[2]
    blocks = slot_mapping // block_size
    rows = slot_mapping % block_size
    key_cache[blocks, :, rows] = k.to(key_cache.dtype)
    value_cache[blocks, :, rows] = v.to(value_cache.dtype)


def copy_blocks(key_cache: Tensor, value_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """See `octavo.kernels.ops.copy_blocks`."""
    for cache in (key_cache.view(uint8), value_cache.view(uint8)):
        cache.index_copy_(0, dst, cache.index_select(0, src))


def swap_blocks(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copies blocks `source_ids` [n] of one cache to blocks `target_ids` [n] of another, in place.

    Caches are [blocks, ...] with blocks of one shape and dtype and may be on different devices;
    ids are int64, and `target_ids` holds none twice.
    """
    # As bytes: e4m3 has no such operations on CPU.
    blocks = source.view(uint8).index_select(0, source_ids.to(source.device))
    target.view(uint8).index_copy_(0, target_ids.to(target.device), blocks.to(target.device))
