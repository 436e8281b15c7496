# ruff: noqa: ANN401  # Numba has no types
"""Causal attention straight from the block table, with an online softmax in float32.

An item of work is (sequence, tile of query tokens, KV head), a chunk several of them; the query
heads that share a KV head are rows of the same products. Keys are taken in spans of up to 128:
their scores, then the softmax so far rescaled, then the values. Keys and values are widened in
registers. Reading them from memory takes longer than computing: while scores are computed the
values of the span are fetched, and with the values the keys of the span, or of the item, after.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import literally
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.attention_args import PagedBatch
from octavo.kernels.cpu.compiled import Kernel, inlined, inlined_ignoring_nan
from octavo.kernels.cpu.intrinsics import (
    bits_to_f32,
    keep_alive,
    load_f32,
    load_i32,
    load_i64,
    prefetch,
    store_f32,
    store_i64,
)
from octavo.kernels.cpu.math import exp, tanh
from octavo.kernels.cpu.numbers import (
    BF16,
    CODES,
    F32,
    float_bits,
    store_row,
    token_rows,
    widen_row,
)
from octavo.kernels.cpu.pool import report, shared_pool
from octavo.kernels.cpu.processor import MAX_ROWS, PANEL
from octavo.kernels.cpu.tile import (
    BF16_ROWS,
    DOT_KEYS,
    DOT_ROWS,
    dot_tile,
    gemm_tile,
)

_SPAN = 128
_TILE_ROWS = 30
# Chunks of work, about; enough for threads to end together.
_CHUNKS = 12
# A row of scores; where a span begins within a block, scores step back before its first column.
_SCORE_BYTES = 4 * (_SPAN + 2 * DOT_KEYS)
# In place of minus infinity, whose difference to itself is not a number.
_LOWEST = np.float32(-1e30)
_ZERO = np.float32(0)

# The kernel's arguments, in this order.
(
    _Q,
    _Q_STRIDE,
    _KEYS,
    _VALUES,
    _TABLES,
    _TABLE_STRIDE,
    _LENGTHS,
    _STARTS,
    _SEQUENCES,
    _Q_HEADS,
    _KV_HEADS,
    _BLOCK_SIZE,
    _SIZE,
    _BLOCKS,
    _OUT,
    _SCALE,
    _WINDOW,
    _SOFT_CAP,
    _PER_TILE,
    _TABLE_COLUMNS,
    _WIDE_OUT,
    _PER_CHUNK,
) = range(22)

# What is fixed for an item of work: its KV head, its sequence's block table, the row in q of its
# first token, that token's position, the number of tokens and of query rows; then the addresses
# of float32 queries [rows, D], sums [rows, D padded], scores, and (largest, total) of each row.
(_HEAD, _TABLE, _TOKEN, _POSITION, _TOKENS, _ROWS, _WIDE_Q, _SUMS, _SCORES, _STATE) = range(10)
_FRAME_WORDS = 10


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """See `octavo.kernels.ops.paged_attention`."""
    if not fits_cache(q.dtype, key_cache):
        return reference.paged_attention(q, key_cache, value_cache, batch, scale, window, soft_cap)
    q = token_rows(q)
    tokens, q_heads, size = q.shape
    blocks, kv_heads, block_size, _ = key_cache.shape
    tables, lengths = _int32(batch.block_tables), _int32(batch.seq_lens)
    starts = _int32(batch.query_start_loc)
    sequences = lengths.shape[0]
    per_tile = min(tokens_per_tile(q_heads // kv_heads), max(1, batch.max_query_len))
    items = (tokens // per_tile + sequences) * kv_heads
    per_chunk = items_per_chunk(items)
    out = q.new_empty(q.shape)
    wrong = shared_pool().run(
        ATTENTION[q.dtype],
        -(-items // per_chunk),
        q.data_ptr(),
        q.stride(0) * q.itemsize,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        tables.data_ptr(),
        tables.stride(0),
        lengths.data_ptr(),
        starts.data_ptr(),
        sequences,
        q_heads,
        kv_heads,
        block_size,
        size,
        blocks,
        out.data_ptr(),
        float_bits(scale),
        window or 0,
        float_bits(soft_cap or 0.0),
        per_tile,
        tables.shape[1],
        0,
        per_chunk,
    )
    if wrong:
        raise IndexError("paged_attention: a block table names a block outside the cache")
    return out


def tokens_per_tile(group: int) -> int:
    """Query tokens in a chunk of work, at most, for `group` query heads of a KV head."""
    return max(1, _TILE_ROWS // group)


def items_per_chunk(items: int) -> int:
    """Items of work that one thread takes at once, in a row for the sake of fetching ahead."""
    return max(1, items // _CHUNKS)


def fits_cache(dtype: torch.dtype, key_cache: Tensor) -> bool:
    """Whether the kernel takes queries of `dtype` over such a cache.

    It reads four keys of a block and eight components of a key at a time.

    Of values it reads sixteen components, so for other sizes it may touch the start of the row
    after; after the last block of a pool that is the dummy block.
    """
    _, _, block_size, size = key_cache.shape
    return key_cache.dtype == dtype and size % 8 == 0 and block_size >= DOT_KEYS


def _int32(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()


@inlined_ignoring_nan
def _largest(row: int, first: int, end: int, least: np.float32) -> np.float32:
    for i in range(first, end):
        value = load_f32(row, i)
        least = value if value > least else least
    return least


@inlined
def _softmax_span(
    row: int, first: int, end: int, count: int, soft_cap: np.float32, state: int
) -> np.float32:
    """Turn scores row[first:end] into weights, the rest of row[:count] into zeros.

    `state` holds the largest score so far and the sum of weights. The result is the factor for
    what was summed before.
    """
    if soft_cap != _ZERO:
        for i in range(first, end):
            store_f32(row, i, soft_cap * tanh(load_f32(row, i) / soft_cap))
    before = load_f32(state, 0)
    largest = _largest(row, first, end, before)
    total = _ZERO
    for i in range(first, end):
        weight = exp(load_f32(row, i) - largest)
        store_f32(row, i, weight)
        total += weight
    for i in range(first):
        store_f32(row, i, _ZERO)
    for i in range(max(first, end), count):
        store_f32(row, i, _ZERO)
    factor: np.float32 = exp(before - largest)
    store_f32(state, 0, largest)
    store_f32(state, 1, load_f32(state, 1) * factor + total)
    return factor


@inlined
def _padded(size: int) -> int:
    return (size + PANEL - 1) // PANEL * PANEL


@inlined
def _locate(a: int, f: int, chunk: int) -> bool:
    """Fill the first part of the frame `f`; False past the last tile of queries."""
    per_tile, starts, kv_heads = (
        load_i64(a, _PER_TILE),
        load_i64(a, _STARTS),
        load_i64(a, _KV_HEADS),
    )
    number = chunk // kv_heads
    for sequence in range(load_i64(a, _SEQUENCES)):
        start = load_i32(starts, sequence)
        queries = load_i32(starts, sequence + 1) - start
        tiles = (queries + per_tile - 1) // per_tile
        if number < tiles:
            first = number * per_tile
            tokens = min(per_tile, queries - first)
            position = load_i32(load_i64(a, _LENGTHS), sequence) - queries + first
            stride = load_i64(a, _TABLE_STRIDE)
            store_i64(f, _HEAD, chunk % kv_heads)
            store_i64(f, _TABLE, load_i64(a, _TABLES) + sequence * stride * 4)
            store_i64(f, _TOKEN, start + first)
            store_i64(f, _POSITION, position)
            store_i64(f, _TOKENS, tokens)
            store_i64(f, _ROWS, tokens * (load_i64(a, _Q_HEADS) // kv_heads))
            if position + tokens > load_i64(a, _TABLE_COLUMNS) * load_i64(a, _BLOCK_SIZE):
                report(a, 1)
                return False
            return True
        number -= tiles
    return False


@inlined
def _head_row(a: int, f: int, row: int) -> tuple[int, int]:
    """(token, query head) of a query row."""
    group = load_i64(a, _Q_HEADS) // load_i64(a, _KV_HEADS)
    return load_i64(f, _TOKEN) + row // group, load_i64(f, _HEAD) * group + row % group


@inlined
def _load_queries(code: int, a: int, f: int) -> None:
    """Queries times the scale; sums and totals set to zero."""
    size = load_i64(a, _SIZE)
    padded, scale = _padded(size), bits_to_f32(load_i64(a, _SCALE))
    for row in range(load_i64(f, _ROWS)):
        token, head = _head_row(a, f, row)
        item = 4 if code == F32 else 2
        source = load_i64(a, _Q) + token * load_i64(a, _Q_STRIDE) + head * size * item
        target = load_i64(f, _WIDE_Q) + row * size * 4
        widen_row(code, source, target, size)
        for i in range(size):
            store_f32(target, i, load_f32(target, i) * scale)
        for i in range(padded):
            store_f32(load_i64(f, _SUMS), row * padded + i, _ZERO)
        store_f32(load_i64(f, _STATE), 2 * row, _LOWEST)
        store_f32(load_i64(f, _STATE), 2 * row + 1, _ZERO)


@inlined
def _cache_row(a: int, f: int, position: int) -> int:
    """Row of a key in the cache seen as [blocks * Hkv * block_size, D]; -1 for a wrong block."""
    block_size = load_i64(a, _BLOCK_SIZE)
    block = load_i32(load_i64(f, _TABLE), position // block_size)
    if block < 0 or block >= load_i64(a, _BLOCKS):
        report(a, 1)
        return -1
    heads = block * load_i64(a, _KV_HEADS) + load_i64(f, _HEAD)
    row: int = heads * block_size + position % block_size
    return row


@inlined
def _fetch(address: int, count: int) -> None:
    """Have `count` bytes brought near while other work goes on."""
    for offset in range(0, count, 64):
        prefetch(address + offset)


@inlined
def _score_span(code: int, a: int, f: int, here: int, count: int) -> bool:
    """Scores of all rows with the keys `here` ... `here + count`."""
    size, block_size = load_i64(a, _SIZE), load_i64(a, _BLOCK_SIZE)
    rows, wide_q = load_i64(f, _ROWS), load_i64(f, _WIDE_Q)
    key_bytes = size * (4 if code == F32 else 2)
    column = 0
    next_row = _cache_row(a, f, here)
    while column < count:
        cache_row = next_row
        if cache_row < 0:
            return False
        keys = load_i64(a, _KEYS) + cache_row * key_bytes
        in_block = block_size - (here + column) % block_size
        take = min(in_block, count - column)
        if column + take < count:
            next_row = _cache_row(a, f, here + column + take)
        for start in range(0, take, DOT_KEYS):
            # At the end of a block step back rather than read past it.
            key = min(start, in_block - DOT_KEYS)
            _fetch(load_i64(a, _VALUES) + (cache_row + key) * key_bytes, DOT_KEYS * key_bytes)
            for row in range(0, rows, DOT_ROWS):
                dot_tile(
                    literally(code),
                    min(DOT_ROWS, rows - row),
                    wide_q + row * size * 4,
                    size * 4,
                    keys + key * key_bytes,
                    key_bytes,
                    size // 8,
                    load_i64(f, _SCORES) + row * _SCORE_BYTES + (column + key) * 4,
                    _SCORE_BYTES,
                )
        column += take
    return True


@inlined
def _weigh_span(a: int, f: int, here: int, count: int) -> None:
    """Softmax over what each row sees of the span; the sums before it are rescaled."""
    group = load_i64(a, _Q_HEADS) // load_i64(a, _KV_HEADS)
    padded, window = _padded(load_i64(a, _SIZE)), load_i64(a, _WINDOW)
    soft_cap = bits_to_f32(load_i64(a, _SOFT_CAP))
    for row in range(load_i64(f, _ROWS)):
        query = load_i64(f, _POSITION) + row // group - here
        first = min(count, max(0, query - window + 1)) if window > 0 else 0
        scores = load_i64(f, _SCORES) + row * _SCORE_BYTES
        state = load_i64(f, _STATE) + 8 * row
        end = min(count, query + 1)
        factor = _softmax_span(scores, first, end, count, soft_cap, state)
        sums = load_i64(f, _SUMS) + row * padded * 4
        for i in range(padded):
            store_f32(sums, i, load_f32(sums, i) * factor)


@inlined
def _fetch_keys(code: int, a: int, f: int, key: int) -> None:
    """Have the keys from `key` to the end of its block brought near, if the item reads them."""
    if f == 0 or key >= load_i64(f, _POSITION) + load_i64(f, _TOKENS):
        return
    key_bytes = load_i64(a, _SIZE) * (4 if code == F32 else 2)
    count = load_i64(a, _BLOCK_SIZE) - key % load_i64(a, _BLOCK_SIZE)
    _fetch(load_i64(a, _KEYS) + _cache_row(a, f, key) * key_bytes, count * key_bytes)


@inlined
def _add_values(
    code: int,
    rows_kind: int,
    a: int,
    f: int,
    span: tuple[int, int],
    following: tuple[int, int],
) -> None:
    """Add the weighted values of a span (first key, count) to the sums.

    `following` is the frame of the item with the next span, or 0, and the first key of that.
    """
    here, count = span
    size, block_size = load_i64(a, _SIZE), load_i64(a, _BLOCK_SIZE)
    rows, padded = load_i64(f, _ROWS), _padded(load_i64(a, _SIZE))
    item = 4 if code == F32 else 2
    column = 0
    while column < count:
        values = load_i64(a, _VALUES) + _cache_row(a, f, here + column) * size * item
        take = min(block_size - (here + column) % block_size, count - column)
        _fetch_keys(code, a, following[0], following[1] + column)
        for row in range(0, rows, MAX_ROWS):
            for part in range(0, size, PANEL):
                gemm_tile(
                    literally(rows_kind),
                    1,
                    min(MAX_ROWS, rows - row),
                    load_i64(f, _SCORES) + row * _SCORE_BYTES + column * 4,
                    _SCORE_BYTES,
                    values + part * item,
                    size * item,
                    take,
                    values,
                    0,
                    load_i64(f, _SUMS) + (row * padded + part) * 4,
                    padded * 4,
                )
        column += take


@inlined
def _store_rows(code: int, a: int, f: int) -> None:
    """Sums over totals, in the dtype of the output; zeros where nothing was seen."""
    size = load_i64(a, _SIZE)
    for row in range(load_i64(f, _ROWS)):
        total = load_f32(load_i64(f, _STATE), 2 * row + 1)
        inverse = _ZERO if total == _ZERO else np.float32(1) / total
        sums = load_i64(f, _SUMS) + row * _padded(size) * 4
        for i in range(size):
            store_f32(sums, i, load_f32(sums, i) * inverse)
        token, head = _head_row(a, f, row)
        wide = load_i64(a, _WIDE_OUT)
        item = 2 if code != F32 and wide == 0 else 4
        target = load_i64(a, _OUT) + (token * load_i64(a, _Q_HEADS) + head) * size * item
        store_row(code, wide, sums, target, size)


@inlined
def _item_bytes(a: int) -> int:
    """Memory that the largest item needs."""
    rows = load_i64(a, _PER_TILE) * (load_i64(a, _Q_HEADS) // load_i64(a, _KV_HEADS))
    size = load_i64(a, _SIZE)
    count: int = rows * (size * 4 + _padded(size) * 4 + 8 + _SCORE_BYTES)
    return count


@inlined
def _lay_out(a: int, f: int, memory: int) -> None:
    """Fill the second part of the frame: where an item's numbers lie."""
    rows, size = load_i64(f, _ROWS), load_i64(a, _SIZE)
    store_i64(f, _WIDE_Q, memory)
    store_i64(f, _SUMS, memory + rows * size * 4)
    store_i64(f, _STATE, load_i64(f, _SUMS) + rows * _padded(size) * 4)
    store_i64(f, _SCORES, load_i64(f, _STATE) + rows * 8 + DOT_KEYS * 4)


@inlined
def _first_key(a: int, f: int) -> int:
    """Where the first span of an item begins.

    Spans begin at multiples of their length, so a query's sums never depend on the step.
    """
    window = load_i64(a, _WINDOW)
    if window == 0:
        return 0
    first: int = max(0, load_i64(f, _POSITION) - window + 1) // _SPAN * _SPAN
    return first


def _attention_kernel(kind: int) -> Callable[[Any, Any], None]:
    """The kernel for tensors of element type `kind`."""
    rows_kind = BF16_ROWS if kind == BF16 else kind

    def attention(a: Any, chunk: Any) -> None:
        frame = np.empty(2 * _FRAME_WORDS, np.int64)
        f, following = frame.ctypes.data, frame.ctypes.data + 8 * _FRAME_WORDS
        memory = np.empty(_item_bytes(a), np.uint8)
        item = chunk * load_i64(a, _PER_CHUNK)
        end_item = item + load_i64(a, _PER_CHUNK)
        found = _locate(a, f, item)
        while found:
            _lay_out(a, f, memory.ctypes.data)
            _load_queries(kind, a, f)
            item += 1
            found = item < end_item and _locate(a, following, item)
            here, end = _first_key(a, f), load_i64(f, _POSITION) + load_i64(f, _TOKENS)
            while here < end:
                count = min(_SPAN, end - here)
                if not _score_span(kind, a, f, here, count):
                    return
                _weigh_span(a, f, here, count)
                ahead, key = 0, 0
                if here + count < end:
                    ahead, key = f, here + count
                elif found:
                    ahead, key = following, _first_key(a, following)
                _add_values(kind, rows_kind, a, f, (here, count), (ahead, key))
                here += count
            _store_rows(kind, a, f)
            f, following = following, f
        keep_alive(frame)
        keep_alive(memory)

    return attention


ATTENTION = {dtype: Kernel(_attention_kernel(code)) for dtype, code in CODES.items()}
