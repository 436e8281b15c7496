"""Paged attention of a mixed step: decode rows and prefill rows each get their own kernel.

Which sequence is which is found on the device, so nothing waits for lengths: the decode kernel
passes over sequences with more than one query token, the prefill kernel over those with one. A
kernel for which the host knows that there is nothing is not started.
"""

import torch
from torch import Tensor

from octavo.kernels.attention_args import StepBatch
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.triton.decode_attention import decode_attention
from octavo.kernels.triton.host import (
    FLOATS,
    MAX_HEAD_SIZE,
    check,
    check_cache,
    check_cache_dtype,
    check_rows_dense,
    check_same_device,
)
from octavo.kernels.triton.prefill_attention import prefill_attention


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: StepBatch,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """See `octavo.kernels.ops.paged_attention`.

    Rows of the result past the last sequence are left as they were allocated.
    """
    return scaled_paged_attention(
        q, PagedCache(key_cache, value_cache), batch, scale, window, soft_cap
    )


def scaled_paged_attention(
    q: Tensor,
    cache: PagedCache,
    batch: StepBatch,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """As `paged_attention`, over a cache that may be e4m3 with scales.

    The entries are converted to the dtype of `q` in registers and the products run in that dtype:
    fp8 tensor cores add up too coarsely over long contexts.
    """
    _check(q, cache, batch, window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if batch.decode_tokens != 0:
        decode_attention(q, cache, batch, out, scale, window, soft_cap)
    if batch.max_query_len > 1:
        prefill_attention(q, cache, batch, out, scale, window, soft_cap)
    return out


def _check(q: Tensor, cache: PagedCache, batch: StepBatch, window: int | None) -> None:
    check(q.dim() == 3, "q must be [T, Hq, D], not {}", tuple(q.shape))
    check(q.dtype in FLOATS, "attention of {}", q.dtype)
    check_rows_dense("q", q)
    check_cache(cache.key, cache.value)
    check_cache_dtype(cache.key, q.dtype)
    _, heads, head_dim = q.shape
    _, kv_heads, _, cache_dim = cache.key.shape
    check(head_dim <= MAX_HEAD_SIZE, "head size {} is above {}", head_dim, MAX_HEAD_SIZE)
    check(cache_dim == head_dim, "head size {} over a cache of {}", head_dim, cache_dim)
    check(heads % kv_heads == 0, "{} query heads do not divide over {} KV heads", heads, kv_heads)
    check(window is None or window > 0, "a window of {} tokens", window)
    sequences = batch.seq_lens.shape[0]
    check(
        batch.block_tables.shape[0] == sequences
        and batch.query_start_loc.shape == (sequences + 1,),
        "{} lengths, tables {}, query starts {}",
        sequences,
        tuple(batch.block_tables.shape),
        tuple(batch.query_start_loc.shape),
    )
    index = (batch.block_tables, batch.seq_lens, batch.query_start_loc)
    check(all(x.dtype == torch.int32 for x in index), "tables, lengths and starts must be int32")
    check_rows_dense("block_tables", batch.block_tables)
    check_same_device(q, cache.key, *index)
    for scale in (cache.key_scale, cache.value_scale):
        if scale is not None:
            valid = scale.dtype == torch.float32 and scale.shape == (kv_heads,)
            check(valid, "cache scales must be float32 [{}]", kv_heads)
