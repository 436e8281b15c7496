"""Attention of sequences with several query tokens: whole prompts and chunks with a history.

One program takes a tile of query tokens of one sequence and one KV head. The tile's ROWS rows are
ROWS // G tokens times the G = Hq / Hkv query heads that share the KV head. Keys and values come
from the cache, where this step's tokens have been stored already, so a chunk needs no case of its
own. Only tiles on the diagonal and on the window's edge are masked.

The host knows no lengths: it starts T // tokens per tile + S programs per KV head, which is always
enough. Tile i of sequence s is program query_start_loc[s] // tokens per tile + s + i, so a binary
search over the sequences finds which one a program belongs to; those left over end at once.

T query tokens   S sequences   D head size
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.attention_args import PagedBatch
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.triton.attention_tile import LOG2_E, MIN_DOT, attend_tile
from octavo.kernels.triton.host import device_facts, power_of_2
from octavo.kernels.triton.tiles import Tiles, forced


@triton.jit
def _sequence_of(query_start_ptr, program, num_sequences, TOKENS: tl.constexpr):
    """The last sequence whose first program is not after `program`."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // TOKENS + middle <= program:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "seq_lens_ptr", "query_start_ptr"],
)
def _prefill_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    out_ptr,
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
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    # The last tiles of a prompt see most tokens: they start first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = _sequence_of(query_start_ptr, program, num_sequences, TOKENS)
    query_start = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - query_start
    first_token = (program - (query_start // TOKENS + sequence)) * TOKENS
    # Sequences with one query token belong to the decode kernel.
    if first_token >= query_len or query_len == 1:
        return
    seq_len = tl.load(seq_lens_ptr + sequence)

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_PAD)
    tokens = first_token + rows // GROUP
    kept_rows = (rows < TOKENS * GROUP) & (tokens < query_len)
    kept = kept_rows[:, None] & (columns < HEAD_DIM)[None, :]
    places = (query_start + tokens).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    q_offsets = places[:, None] * q_token_stride + heads[:, None] * q_head_stride
    q = tl.load(q_ptr + q_offsets + columns[None, :], mask=kept, other=0.0)
    if key_scale_ptr is not None:
        score_scale *= tl.load(key_scale_ptr + kv_head)
    key_ptr += kv_head * head_stride
    value_ptr += kv_head * head_stride
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride

    acc = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    positions = seq_len - query_len + tokens
    end_seen = positions + 1
    first_seen = tl.zeros((ROWS,), tl.int32)
    low = seq_len - query_len + first_token
    high = seq_len - query_len + tl.minimum(first_token + TOKENS, query_len) - 1
    end = high + 1
    full_begin = 0
    if WINDOW:
        first_seen = tl.maximum(end_seen - window, 0)
        begin = tl.maximum(low + 1 - window, 0) // TILE * TILE
        full_begin = tl.maximum((end - window + TILE - 1) // TILE * TILE, begin)
        for start in range(begin, tl.minimum(full_begin, end), TILE):
            acc, peak, total = attend_tile(
                acc, peak, total, q, first_seen, end_seen, key_ptr, value_ptr, table_ptr, start,
                end, block_stride, row_stride, score_scale, soft_cap, HEAD_DIM, BLOCK_SIZE, TILE,
                SOFT_CAP, True,
            )  # fmt: skip
    full_end = tl.maximum((low + 1) // TILE * TILE, full_begin)
    for start in range(full_begin, full_end, TILE):
        acc, peak, total = attend_tile(
            acc, peak, total, q, first_seen, end_seen, key_ptr, value_ptr, table_ptr, start, end,
            block_stride, row_stride, score_scale, soft_cap, HEAD_DIM, BLOCK_SIZE, TILE, SOFT_CAP,
            False,
        )  # fmt: skip
    for start in range(full_end, end, TILE):
        acc, peak, total = attend_tile(
            acc, peak, total, q, first_seen, end_seen, key_ptr, value_ptr, table_ptr, start, end,
            block_stride, row_stride, score_scale, soft_cap, HEAD_DIM, BLOCK_SIZE, TILE, SOFT_CAP,
            True,
        )  # fmt: skip

    if value_scale_ptr is not None:
        acc *= tl.load(value_scale_ptr + kv_head)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_offsets = places[:, None] * out_token_stride + heads[:, None] * out_head_stride
    tl.store(out_ptr + out_offsets + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=kept)


def _tiles(q: Tensor, cache: Tensor, head_pad: int, group: int, max_query_len: int) -> Tiles:
    """Tile sizes: as large as registers and shared memory allow, small where rows would be empty.

    Shared memory tells the families apart: 227 KiB with wgmma (sm_90, sm_100), 99 to 163 KiB with
    mma.sync (sm_8x, sm_120), 64 KiB on CDNA. `resources` shows what each choice takes.
    """
    if q.dtype == torch.float32:
        return Tiles(rows=16, tile=16, num_warps=4, num_stages=1)
    memory = device_facts(q.device).shared_memory
    rows_needed = max_query_len * group
    converted = cache.dtype != q.dtype
    stages = 2 if memory > 64 * 1024 else 1
    if rows_needed <= 16:
        return Tiles(rows=16, tile=32, num_warps=4, num_stages=stages)
    if head_pad > 128:
        rows = 128 if memory > 200 * 1024 and rows_needed > 64 and not converted else 64
        tile = 16 if stages == 1 and converted else 32
        return Tiles(rows, tile, num_warps=8, num_stages=stages)
    if memory > 200 * 1024:
        if rows_needed <= 64:
            return Tiles(rows=64, tile=64, num_warps=4, num_stages=2)
        # A third stage of small heads would leave too few registers to convert e4m3 in.
        stages = 2 if converted and head_pad <= 64 else 3
        return Tiles(rows=128, tile=64, num_warps=8, num_stages=stages)
    # A group that is no power of two costs registers for the division of rows.
    if rows_needed <= 64 or group & (group - 1):
        return Tiles(rows=64, tile=32, num_warps=4, num_stages=stages)
    return Tiles(rows=128, tile=32, num_warps=8, num_stages=stages)


def prefill_attention(
    q: Tensor,
    cache: PagedCache,
    batch: PagedBatch,
    out: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Writes the rows of `out` [T, Hq, D] that belong to sequences with several query tokens.

    The other rows stay as they are. Arguments as `paged_attention`, which has checked them.
    """
    sequences = batch.seq_lens.shape[0]
    num_tokens, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = cache.key.shape
    group = heads // kv_heads
    head_pad = max(MIN_DOT, power_of_2(head_dim))
    tiles = forced() or _tiles(q, cache.key, head_pad, group, batch.max_query_len)
    rows = max(tiles.rows, power_of_2(group))
    _prefill_kernel[(num_tokens // (rows // group) + sequences, kv_heads)](
        q,
        cache.key,
        cache.value,
        cache.key_scale,
        cache.value_scale,
        out,
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
        ROWS=rows,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        TILE=tiles.tile,
        SOFT_CAP=soft_cap is not None,
        WINDOW=window is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
