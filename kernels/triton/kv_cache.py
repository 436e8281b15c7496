"""Writes into the paged cache, and copies of whole blocks within it and between two caches.

Caches are [blocks, Hkv, block_size, D]. All addresses are int64: at 100 GB a cache passes 2^31
elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.host import (
    FLOATS,
    FP8,
    ceil_div,
    check,
    check_cache,
    check_pair,
    check_rows_dense,
    check_same_device,
    power_of_2,
)

_COPY_TILE = 1024
_HEADS = 4
"""KV heads that one program stores."""


@triton.jit
def store_heads(
    cache_ptr,
    scale_ptr,
    x,
    slot,
    heads,
    kept_heads,
    block_stride,
    head_stride,
    row_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Stores x [H, D] of heads `heads` [H] at cache address `slot`, where `kept_heads` [H].

    With a scale per head x is divided by it. Values beyond the range of e4m3 become its largest.
    """
    columns = tl.arange(0, x.shape[1])
    if scale_ptr is not None:
        x = x.to(tl.float32) / tl.load(scale_ptr + heads, mask=kept_heads, other=1.0)[:, None]
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    kept = kept_heads[:, None] & (columns < HEAD_DIM)[None, :]
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * row_stride
    offsets = place + heads.to(tl.int64)[:, None] * head_stride + columns[None, :]
    tl.store(cache_ptr + offsets, x.to(cache_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_kernel(
    k_ptr,
    v_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    block_stride: tl.int64,
    head_stride: tl.int64,
    row_stride: tl.int64,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HEAD_PAD)
    kept_heads = heads < KV_HEADS
    kept = kept_heads[:, None] & (columns < HEAD_DIM)[None, :]
    wide = heads.to(tl.int64)[:, None]
    k_offsets = token * k_token_stride + wide * k_head_stride + columns[None, :]
    v_offsets = token * v_token_stride + wide * v_head_stride + columns[None, :]
    k = tl.load(k_ptr + k_offsets, mask=kept, other=0.0)
    v = tl.load(v_ptr + v_offsets, mask=kept, other=0.0)
    store_heads(
        key_ptr, None, k, slot, heads, kept_heads, block_stride, head_stride, row_stride,
        HEAD_DIM, BLOCK_SIZE,
    )  # fmt: skip
    store_heads(
        value_ptr, None, v, slot, heads, kept_heads, block_stride, head_stride, row_stride,
        HEAD_DIM, BLOCK_SIZE,
    )  # fmt: skip


def write_kv_cache(
    k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """See `octavo.kernels.ops.write_kv_cache`."""
    check_cache(key_cache, value_cache)
    tokens, kv_heads, head_dim = k.shape
    _, cache_heads, block_size, cache_dim = key_cache.shape
    check_pair(k, v)
    check(
        (cache_heads, cache_dim) == (kv_heads, head_dim), "k {}, cache {}", k.shape, key_cache.shape
    )
    check(k.dtype in FLOATS and key_cache.dtype in (*FLOATS, FP8), "a cache of {}", key_cache.dtype)
    check_rows_dense("k", k)
    check_rows_dense("v", v)
    check_slots(slot_mapping, tokens)
    check_same_device(k, v, key_cache, slot_mapping)
    _write_kernel[(tokens, ceil_div(kv_heads, _HEADS))](
        k,
        v,
        key_cache,
        value_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        KV_HEADS=kv_heads,
        HEADS=_HEADS,
        HEAD_DIM=head_dim,
        HEAD_PAD=power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        num_warps=4,
    )


def check_slots(slot_mapping: Tensor, tokens: int) -> None:
    """Raises ValueError unless `slot_mapping` is int64 [tokens]."""
    right = slot_mapping.shape == (tokens,) and slot_mapping.dtype == torch.int64
    check(right, "slots {} {} for {} tokens", tuple(slot_mapping.shape), slot_mapping.dtype, tokens)
    check_rows_dense("slot_mapping", slot_mapping)


@triton.jit(do_not_specialize_on_alignment=["source_ids_ptr", "target_ids_ptr"])
def _copy_kernel(
    source_ptr,
    target_ptr,
    source_ids_ptr,
    target_ids_ptr,
    source_stride: tl.int64,
    target_stride: tl.int64,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    pair = tl.program_id(0)
    source = tl.load(source_ids_ptr + pair) * source_stride
    target = tl.load(target_ids_ptr + pair) * target_stride
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    kept = offsets < SIZE
    entries = tl.load(source_ptr + source + offsets, mask=kept)
    tl.store(target_ptr + target + offsets, entries, mask=kept)


def swap_blocks(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copies blocks `source_ids` [n] of one cache to blocks `target_ids` [n] of another, in place.

    Caches are [blocks, ...] with contiguous blocks of one size and dtype, ids int64 on the GPU;
    `target_ids` holds no id twice. One of the caches may be in pinned host memory, which the GPU
    reads and writes over the bus.
    """
    same = source.shape[1:] == target.shape[1:] and source.dtype == target.dtype
    check(
        same,
        "blocks {} {} and {} {}",
        source.shape[1:],
        source.dtype,
        target.shape[1:],
        target.dtype,
    )
    for cache in (source, target):
        check(cache[:1].is_contiguous(), "the blocks of a cache must be contiguous")
    for ids in (source_ids, target_ids):
        right = ids.dtype == torch.int64 and ids.shape == source_ids.shape
        check(right, "block ids {} {}", tuple(ids.shape), ids.dtype)
        check_rows_dense("block ids", ids)
    check_same_device(source_ids, target_ids)
    size = source[:1].numel()
    if not source_ids.numel():
        return
    # Bits are moved, not numbers: NaN payloads stay, and e4m3 needs no support.
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[source.dtype.itemsize]
    _copy_kernel[(source_ids.shape[0], ceil_div(size, _COPY_TILE))](
        source.view(words),
        target.view(words),
        source_ids,
        target_ids,
        source.stride(0),
        target.stride(0),
        SIZE=size,
        TILE=_COPY_TILE,
        num_warps=4,
    )


def copy_blocks(key_cache: Tensor, value_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """See `octavo.kernels.ops.copy_blocks`."""
    check_cache(key_cache, value_cache)
    order = torch.arange(src.shape[0], device=src.device)
    for cache in (key_cache, value_cache):
        # A block may be read by one pair and written by another: all are read first.
        scratch = torch.empty(
            (src.shape[0], *cache.shape[1:]), dtype=cache.dtype, device=cache.device
        )
        swap_blocks(cache, scratch, src, order)
        swap_blocks(scratch, cache, order, dst)
