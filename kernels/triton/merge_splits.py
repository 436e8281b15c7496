"""Combines the partial results of split attention.

With peak_s, total_s and acc_s of each split, and P = max peak_s, the result is
sum_s 2^(peak_s - P) acc_s / sum_s 2^(peak_s - P) total_s. With one split the factor is exactly 1,
so the result has the same bits as without splitting.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.attention_args import PagedBatch
from octavo.kernels.triton.host import power_of_2

_TILE = 8


@triton.jit(do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_ptr"])
def _merge_kernel(
    acc_ptr,
    stats_ptr,
    out_ptr,
    seq_lens_ptr,
    query_start_ptr,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    window,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token = tl.load(query_start_ptr + sequence).to(tl.int64)
    if tl.load(query_start_ptr + sequence + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens_ptr + sequence)
    first_split = 0
    if WINDOW:
        first_split = tl.maximum(seq_len - window, 0) // SPLIT
    end_split = (seq_len + SPLIT - 1) // SPLIT

    columns = tl.arange(0, HEAD_PAD)
    base = (sequence * tl.num_programs(1) + head) * SPLITS
    splits = tl.arange(0, SPLITS)
    peaks = tl.load(
        stats_ptr + (base + splits) * 2,
        mask=(splits >= first_split) & (splits < end_split),
        other=float("-inf"),
    )
    top = tl.max(peaks, 0)
    acc = tl.zeros((HEAD_PAD,), tl.float32)
    total = 0.0
    # Tiles of a fixed size add up in the same order whatever SPLITS is.
    for start in range(first_split // TILE * TILE, end_split, TILE):
        places = start + tl.arange(0, TILE)
        used = (places >= first_split) & (places < end_split)
        peak = tl.load(stats_ptr + (base + places) * 2, mask=used, other=float("-inf"))
        weight = tl.exp2(peak - top)
        partial = tl.load(
            acc_ptr + (base + places)[:, None] * HEAD_DIM + columns[None, :],
            mask=used[:, None] & (columns < HEAD_DIM)[None, :],
            other=0.0,
        )
        acc += tl.sum(partial * weight[:, None], 0)
        totals = tl.load(stats_ptr + (base + places) * 2 + 1, mask=used, other=0.0)
        total += tl.sum(totals * weight, 0)
    out = acc / tl.where(total > 0, total, 1.0)
    offsets = token * out_token_stride + head * out_head_stride + columns
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=columns < HEAD_DIM)


def merge_splits(
    acc: Tensor,
    stats: Tensor,
    batch: PagedBatch,
    out: Tensor,
    split_tokens: int,
    window: int | None,
) -> None:
    """Writes the rows of `out` [T, Hq, D] that belong to sequences with one query token.

    acc fp32 [B, Hq, S, D] and stats fp32 [B, Hq, S, 2] (peak, total) as `decode_attention` leaves
    them; S is a power of two. Split s covers positions s * split_tokens and following. Entries of
    splits outside the sequence or its window are never read. No split at all gives zeros.
    """
    sequences, heads, splits, head_dim = acc.shape
    _merge_kernel[(sequences, heads)](
        acc,
        stats,
        out,
        batch.seq_lens,
        batch.query_start_loc,
        out.stride(0),
        out.stride(1),
        window or 0,
        HEAD_DIM=head_dim,
        HEAD_PAD=power_of_2(head_dim),
        SPLIT=split_tokens,
        SPLITS=splits,
        TILE=_TILE,
        WINDOW=window is not None,
        num_warps=2,
    )
