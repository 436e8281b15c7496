"""Norm of heads, rotary embedding and the cache write, in one launch.

One program takes _HEADS heads of one token: query heads go to the output, key heads to an output
or the cache, value heads to the cache. Component i of a head is paired with i + R / 2 (NeoX
halves); its partner is loaded a second time, which costs no memory traffic.

T tokens   Hq, Hkv query and KV heads   D head size   R <= D rotated components
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cache_args import PagedCache
from octavo.kernels.rotary_args import HeadNorm, Rotation
from octavo.kernels.triton.host import (
    FLOATS,
    ceil_div,
    check,
    check_cache,
    check_cache_dtype,
    check_pair,
    check_rows_dense,
    check_same_device,
    power_of_2,
)
from octavo.kernels.triton.kv_cache import check_slots, store_heads

_HEADS = 4


@triton.jit
def _normed(x, inverse, weight_ptr, columns, known, DTYPE: tl.constexpr):
    """x * inverse * weight with Llama's two roundings; all fp32."""
    weight = tl.load(weight_ptr + columns, mask=known, other=0.0).to(tl.float32)
    quotient = (x * inverse).to(DTYPE).to(tl.float32)
    return (quotient * weight[None, :]).to(DTYPE).to(tl.float32)


@triton.jit
def _rotated(
    heads_ptr,
    kept_heads,
    weight_ptr,
    cos_sin_ptr,
    eps,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The heads at `heads_ptr` [H, 1], normed and rotated: fp32 [H, D]."""
    HALF: tl.constexpr = ROTARY // 2
    columns = tl.arange(0, HEAD_PAD)
    known = columns < HEAD_DIM
    turned = columns < ROTARY
    first = columns < HALF
    partners = tl.where(first, columns + HALF, tl.where(turned, columns - HALF, columns))
    kept = kept_heads[:, None] & known[None, :]
    x = tl.load(heads_ptr + columns[None, :], mask=kept, other=0.0).to(tl.float32)
    y = tl.load(heads_ptr + partners[None, :], mask=kept, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = _normed(x, inverse, weight_ptr, columns, known, DTYPE)
        y = _normed(y, inverse, weight_ptr, partners, known, DTYPE)
    angle = tl.where(first, columns, columns - HALF)
    cos = tl.load(cos_sin_ptr + angle, mask=turned, other=1.0)
    sin = tl.load(cos_sin_ptr + HALF + angle, mask=turned, other=0.0)
    return x * cos[None, :] + y * tl.where(first, -sin, sin)[None, :]


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rotary_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_out_ptr,
    q_weight_ptr,
    k_weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    slots_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    table_stride: tl.int64,
    block_stride: tl.int64,
    head_stride: tl.int64,
    row_stride: tl.int64,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    Q_TILES: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lanes = tl.arange(0, HEADS)
    columns = tl.arange(0, HEAD_PAD)
    known = (columns < HEAD_DIM)[None, :]
    row_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * table_stride
    if tile < Q_TILES:
        heads = tile * HEADS + lanes
        wide = heads.to(tl.int64)[:, None]
        kept = heads < Q_HEADS
        heads_ptr = q_ptr + token * q_token_stride + wide * q_head_stride
        out = _rotated(
            heads_ptr, kept, q_weight_ptr, row_ptr, eps, HEAD_DIM, HEAD_PAD, ROTARY, DTYPE
        )
        offsets = (token * Q_HEADS + wide) * HEAD_DIM + columns[None, :]
        tl.store(q_out_ptr + offsets, out.to(DTYPE), mask=kept[:, None] & known)
    elif tile < Q_TILES + KV_TILES:
        heads = (tile - Q_TILES) * HEADS + lanes
        wide = heads.to(tl.int64)[:, None]
        kept = heads < KV_HEADS
        heads_ptr = k_ptr + token * k_token_stride + wide * k_head_stride
        out = _rotated(
            heads_ptr, kept, k_weight_ptr, row_ptr, eps, HEAD_DIM, HEAD_PAD, ROTARY, DTYPE
        ).to(DTYPE)
        if k_out_ptr is not None:
            offsets = (token * KV_HEADS + wide) * HEAD_DIM + columns[None, :]
            tl.store(k_out_ptr + offsets, out, mask=kept[:, None] & known)
        else:
            slot = tl.load(slots_ptr + token)
            store_heads(
                key_ptr, key_scale_ptr, out, slot, heads, kept & (slot >= 0),
                block_stride, head_stride, row_stride, HEAD_DIM, BLOCK_SIZE,
            )  # fmt: skip
    elif v_ptr is not None:
        heads = (tile - Q_TILES - KV_TILES) * HEADS + lanes
        kept = heads < KV_HEADS
        offsets = heads.to(tl.int64)[:, None] * v_head_stride + columns[None, :]
        kept_values = kept[:, None] & known
        values = tl.load(v_ptr + token * v_token_stride + offsets, mask=kept_values, other=0.0)
        slot = tl.load(slots_ptr + token)
        store_heads(
            value_ptr, value_scale_ptr, values, slot, heads, kept & (slot >= 0),
            block_stride, head_stride, row_stride, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip


def rotary_embedding(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.ops.rotary_embedding`."""
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    return _launch(q, (k, None), (k_out, None, None), None, Rotation(positions, cos_sin)), k_out


def rotate_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: HeadNorm | None,
    rotation: Rotation,
    cache: PagedCache,
    slot_mapping: Tensor,
) -> Tensor:
    """See `octavo.kernels.reference.rotate_and_cache`."""
    check_cache(cache.key, cache.value)
    check_cache_dtype(cache.key, k.dtype)
    check_pair(k, v)
    fits = (cache.key.shape[1], cache.key.shape[3]) == k.shape[1:]
    check(fits, "k {} for a cache {}", tuple(k.shape), tuple(cache.key.shape))
    check_rows_dense("v", v)
    check_slots(slot_mapping, k.shape[0])
    check_same_device(q, v, cache.key, slot_mapping)
    return _launch(q, (k, v), (None, cache, slot_mapping), norm, rotation)


def _launch(
    q: Tensor,
    inputs: tuple[Tensor, Tensor | None],
    outputs: tuple[Tensor | None, PagedCache | None, Tensor | None],
    norm: HeadNorm | None,
    rotation: Rotation,
) -> Tensor:
    """Rotated q; `inputs` are k and v, `outputs` the rotated k, or cache and slots instead."""
    (k, v), (k_out, cache, slots) = inputs, outputs
    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    rotary = rotation.cos_sin.shape[1]
    check(q.dtype in FLOATS and k.dtype == q.dtype, "q {}, k {}", q.dtype, k.dtype)
    check(k.shape == (tokens, kv_heads, head_dim), "q {}, k {}", tuple(q.shape), tuple(k.shape))
    check(rotary % 2 == 0 and rotary <= head_dim, "{} rotated of {} components", rotary, head_dim)
    check(rotation.cos_sin.dtype == torch.float32, "a table of {}", rotation.cos_sin.dtype)
    check(rotation.positions.shape == (tokens,), "positions {}", tuple(rotation.positions.shape))
    for name, x in (("q", q), ("k", k), ("table", rotation.cos_sin)):
        check_rows_dense(name, x)
    check_rows_dense("positions", rotation.positions)
    check_same_device(q, k, rotation.positions, rotation.cos_sin)
    if norm is not None:
        for weight in (norm.q_weight, norm.k_weight):
            right = weight.shape == (head_dim,) and weight.dtype == q.dtype
            check(right, "norm weights must be {} [{}]", q.dtype, head_dim)
            check_rows_dense("norm weight", weight)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q_tiles, kv_tiles = ceil_div(q_heads, _HEADS), ceil_div(kv_heads, _HEADS)
    strides = (0, 0, 0) if cache is None else cache.key.stride()[:3]
    _rotary_kernel[(tokens, q_tiles + (kv_tiles if v is None else 2 * kv_tiles))](
        q,
        k,
        v,
        q_out,
        k_out,
        None if norm is None else norm.q_weight,
        None if norm is None else norm.k_weight,
        rotation.positions,
        rotation.cos_sin,
        slots,
        None if cache is None else cache.key,
        None if cache is None else cache.value,
        None if cache is None else cache.key_scale,
        None if cache is None else cache.value_scale,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        0 if v is None else v.stride(0),
        0 if v is None else v.stride(1),
        rotation.cos_sin.stride(0),
        *strides,
        0.0 if norm is None else norm.eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEADS=_HEADS,
        HEAD_DIM=head_dim,
        HEAD_PAD=power_of_2(head_dim),
        ROTARY=rotary,
        BLOCK_SIZE=1 if cache is None else cache.key.shape[2],
        num_warps=4,
    )
    return q_out
