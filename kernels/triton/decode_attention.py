"""Attention of sequences with one query token, split over the cached tokens (Flash-Decoding).

One program takes one (sequence, split, KV head). The G = Hq / Hkv query heads that share a KV head
are the rows of its tile, so keys and values are read once. A split always covers the same
SPLIT_TOKENS positions, whatever else is in the batch, so a sequence's sums are added up in the
same order alone and in company. With several splits each leaves (acc, peak, total) in scratch
memory and `merge_splits` combines them.

Program i takes the i-th of all splits, which it finds from the lengths on the device: the host has
a bound on their sum. As many programs for each sequence as the longest needs would nearly all find
nothing where one context is long. At 2 ns each, an estimate, 64 sequences of which one has 128k
tokens would pay 8 ms in a step of 32 layers with 8 KV heads.

B sequences   S splits   D head size
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.attention_args import StepBatch
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.triton.attention_tile import LOG2_E, MIN_DOT, attend_tile
from octavo.kernels.triton.host import ceil_div, power_of_2
from octavo.kernels.triton.merge_splits import merge_splits
from octavo.kernels.triton.tiles import Tiles, forced

SPLIT_TOKENS = 512
"""Scratch traffic is 2 * 4 * G * D bytes per split of 2 * 2 * SPLIT_TOKENS * D bytes: under 2 % for
G = 4, while 4k tokens still give 8 programs per KV head."""


_CHUNK = tl.constexpr(256)


@triton.jit
def _count_splits(
    seq_lens_ptr,
    query_start_ptr,
    sequences,
    num_sequences,
    window,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """How many splits each of `sequences` has; none unless it has one query token."""
    known = sequences < num_sequences
    token = tl.load(query_start_ptr + sequences, mask=known, other=0)
    next_token = tl.load(query_start_ptr + sequences + 1, mask=known, other=0)
    seq_len = tl.load(seq_lens_ptr + sequences, mask=known, other=0)
    count = (seq_len + SPLIT - 1) // SPLIT
    if WINDOW:
        count -= tl.maximum(seq_len - window, 0) // SPLIT
    if SPLITS == 1:
        # No merge writes the zeros of an empty sequence.
        count = tl.maximum(count, 1)
    return tl.where(next_token - token == 1, count, 0)


@triton.jit
def _find_split(
    seq_lens_ptr,
    query_start_ptr,
    item,
    num_sequences,
    window,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """(sequence, which of its splits) that `item` is, in order, and how many there are in all."""
    sequence = 0
    behind = 0
    total = 0
    for start in range(0, num_sequences, _CHUNK):
        counts = _count_splits(
            seq_lens_ptr, query_start_ptr, start + tl.arange(0, _CHUNK), num_sequences, window,
            SPLIT, SPLITS, WINDOW,
        )  # fmt: skip
        ends = total + tl.cumsum(counts, 0)
        passed = ends <= item
        sequence += tl.sum(passed.to(tl.int32), 0)
        behind = tl.maximum(behind, tl.max(tl.where(passed, ends, 0), 0))
        total += tl.sum(counts, 0)
    return sequence, item - behind, total


# Slices of the step's buffers come at any alignment and width: neither may cost a compilation.
@triton.jit(
    do_not_specialize=["num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "seq_lens_ptr", "query_start_ptr"],
)
def _decode_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    out_ptr,
    acc_ptr,
    stats_ptr,
    tables_ptr,
    seq_lens_ptr,
    query_start_ptr,
    num_sequences,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    block_stride: tl.int64,
    head_stride: tl.int64,
    row_stride: tl.int64,
    table_stride: tl.int64,
    score_scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    kv_head = tl.program_id(1).to(tl.int64)
    found, split, num_splits = _find_split(
        seq_lens_ptr, query_start_ptr, tl.program_id(0), num_sequences, window, SPLIT, SPLITS,
        WINDOW,
    )  # fmt: skip
    if tl.program_id(0) >= num_splits:
        return
    sequence = found.to(tl.int64)
    token = tl.load(query_start_ptr + sequence).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + sequence)
    first = 0
    if WINDOW:
        first = tl.maximum(seq_len - window, 0)
        split += first // SPLIT
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, seq_len)

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_PAD)
    heads = kv_head * GROUP + rows
    kept = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    q_offsets = token * q_token_stride + heads[:, None] * q_head_stride + columns[None, :]
    q = tl.load(q_ptr + q_offsets, mask=kept, other=0.0)
    if key_scale_ptr is not None:
        score_scale *= tl.load(key_scale_ptr + kv_head)
    key_ptr += kv_head * head_stride
    value_ptr += kv_head * head_stride
    table_ptr = tables_ptr + sequence * table_stride

    acc = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    first_seen = tl.zeros((ROWS,), tl.int32) + first
    end_seen = tl.zeros((ROWS,), tl.int32) + seq_len
    # Tiles begin at multiples of TILE. Those that no edge cuts run without masks.
    full_begin = begin
    if WINDOW:
        begin = tl.maximum(begin, first // TILE * TILE)
        full_begin = tl.maximum(begin, (first + TILE - 1) // TILE * TILE)
        if begin < full_begin:
            acc, peak, total = attend_tile(
                acc, peak, total, q, first_seen, end_seen, key_ptr, value_ptr, table_ptr, begin,
                end, block_stride, row_stride, score_scale, soft_cap, HEAD_DIM, BLOCK_SIZE, TILE,
                SOFT_CAP, True,
            )  # fmt: skip
    full_end = tl.maximum(end // TILE * TILE, full_begin)
    for start in range(full_begin, full_end, TILE):
        acc, peak, total = attend_tile(
            acc, peak, total, q, first_seen, end_seen, key_ptr, value_ptr, table_ptr, start, end,
            block_stride, row_stride, score_scale, soft_cap, HEAD_DIM, BLOCK_SIZE, TILE, SOFT_CAP,
            False,
        )  # fmt: skip
    if full_end < end:
        acc, peak, total = attend_tile(
            acc, peak, total, q, first_seen, end_seen, key_ptr, value_ptr, table_ptr, full_end,
            end, block_stride, row_stride, score_scale, soft_cap, HEAD_DIM, BLOCK_SIZE, TILE,
            SOFT_CAP, True,
        )  # fmt: skip

    if value_scale_ptr is not None:
        acc *= tl.load(value_scale_ptr + kv_head)
    if SPLITS == 1:
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_offsets = token * out_token_stride + heads[:, None] * out_head_stride + columns[None, :]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=kept)
    else:
        num_heads = tl.num_programs(1).to(tl.int64) * GROUP
        place = (sequence * num_heads + heads) * SPLITS + split
        tl.store(acc_ptr + place[:, None] * HEAD_DIM + columns[None, :], acc, mask=kept)
        tl.store(stats_ptr + place * 2, peak, mask=rows < GROUP)
        tl.store(stats_ptr + place * 2 + 1, total, mask=rows < GROUP)


def _tiles(q: Tensor, head_pad: int, splits: int) -> Tiles:
    wide = q.dtype == torch.float32
    tile = 64 if head_pad <= 128 else 32
    # With the division at the end, four warps have too few registers for it on sm_100.
    warps = 8 if splits == 1 and head_pad == 128 and not wide else 4
    return Tiles(MIN_DOT, tile // 2 if wide else tile, warps, num_stages=2 if wide else 3)


def _bound(batch: StepBatch, splits: int, window: int | None) -> int:
    """Most splits that the sequences with one query token have together."""
    sequences = batch.seq_lens.shape[0]
    each = splits if window is None else min(splits, ceil_div(window, SPLIT_TOKENS) + 1)
    most = sequences * each
    if batch.decode_tokens is None:
        return most
    # Every sequence may have a last split that is not full, or an empty one.
    return min(most, batch.decode_tokens // SPLIT_TOKENS + sequences)


def decode_attention(
    q: Tensor,
    cache: PagedCache,
    batch: StepBatch,
    out: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Writes the rows of `out` [T, Hq, D] that belong to sequences with one query token.

    The other rows stay as they are. Arguments as `paged_attention`, which has checked them.
    """
    sequences = batch.seq_lens.shape[0]
    _, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = cache.key.shape
    group = heads // kv_heads
    splits = power_of_2(ceil_div(batch.max_seq_len, SPLIT_TOKENS))
    acc = stats = out
    if splits > 1:
        # Never cleared: the merge reads only what a split has written.
        scratch = (sequences, heads, splits)
        acc = torch.empty((*scratch, head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((*scratch, 2), dtype=torch.float32, device=q.device)
    head_pad = max(MIN_DOT, power_of_2(head_dim))
    tiles = forced() or _tiles(q, head_pad, splits)
    programs = _bound(batch, splits, window)
    _decode_kernel[(programs, kv_heads)](
        q,
        cache.key,
        cache.value,
        cache.key_scale,
        cache.value_scale,
        out,
        acc,
        stats,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        sequences,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        cache.key.stride(0),
        cache.key.stride(1),
        cache.key.stride(2),
        batch.block_tables.stride(0),
        scale if soft_cap is not None else scale * LOG2_E.value,
        soft_cap or 0.0,
        window or 0,
        GROUP=group,
        ROWS=max(tiles.rows, power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        TILE=tiles.tile,
        SPLIT=SPLIT_TOKENS,
        SPLITS=splits,
        SOFT_CAP=soft_cap is not None,
        WINDOW=window is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        merge_splits(acc, stats, batch, out, SPLIT_TOKENS, window)
