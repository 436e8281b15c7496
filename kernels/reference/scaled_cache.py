"""Attention over, and writes into, a cache whose entries have a scale per KV head."""

import torch
from torch import Tensor

from octavo.kernels.attention_args import PagedBatch
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.reference.attention import paged_attention
from octavo.kernels.reference.kv_cache import write_kv_cache
from octavo.kernels.reference.norm import rms_norm
from octavo.kernels.reference.rotary import rotary_embedding
from octavo.kernels.rotary_args import HeadNorm, Rotation

_E4M3_MAX = 448.0


def scaled_paged_attention(
    q: Tensor,
    cache: PagedCache,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """As `octavo.kernels.ops.paged_attention`, over a cache that may be e4m3 with scales."""
    keys = _meant(cache.key, cache.key_scale)
    values = _meant(cache.value, cache.value_scale)
    return paged_attention(q, keys, values, batch, scale, window, soft_cap)


def rotate_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: HeadNorm | None,
    rotation: Rotation,
    cache: PagedCache,
    slot_mapping: Tensor,
) -> Tensor:
    """Norms and rotates the heads, stores keys and values, returns q [T, Hq, D].

    q [T, Hq, D], k and v [T, Hkv, D]; `slot_mapping` as for `write_kv_cache`. With scales the
    cache holds k and v divided by them; what an e4m3 cache cannot hold becomes its largest number.
    """
    if norm is not None:
        q = rms_norm(q, norm.q_weight, norm.eps)
        k = rms_norm(k, norm.k_weight, norm.eps)
    q, k = rotary_embedding(q, k, rotation.positions, rotation.cos_sin)
    k, v = _stored(k, cache.key, cache.key_scale), _stored(v, cache.value, cache.value_scale)
    write_kv_cache(k, v, cache.key, cache.value, slot_mapping)
    return q


def _meant(cache: Tensor, scale: Tensor | None) -> Tensor:
    return cache if scale is None else cache.float() * scale[:, None, None]


def _stored(x: Tensor, cache: Tensor, scale: Tensor | None) -> Tensor:
    if scale is not None:
        x = x.float() / scale[:, None]
    return x.clamp(-_E4M3_MAX, _E4M3_MAX) if cache.dtype == torch.float8_e4m3fn else x
