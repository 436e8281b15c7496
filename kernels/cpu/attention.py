# ruff: noqa: ANN401  # Numba has no types
"""Causal attention straight from the block table, with an online softmax in float32.

An item of work is (sequence, tile of query tokens, KV head), a chunk several of them; the query
heads that share a KV head are rows of the same products. Keys are taken in spans of up to 128:
their scores, then the softmax so far rescaled, then the values.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.attention_args import PagedBatch
from octavo.kernels.cpu.attention_item import (
    FRAME_WORDS,
    KV_HEADS,
    OUT,
    PER_CHUNK,
    POSITION,
    Q_HEADS,
    Q_STRIDE,
    QUERIES,
    ROWS,
    SCALE,
    SCORE_BYTES,
    SCORES,
    SIZE,
    SOFT_CAP,
    SPAN,
    STATE,
    SUMS,
    TOKENS,
    WEIGHT_BYTES,
    WEIGHTS,
    WIDE_OUT,
    WINDOW,
    Q,
    first_key,
    head_row,
    item_bytes,
    lay_out,
    locate,
    padded,
)
from octavo.kernels.cpu.attention_spans import (
    add_pairs,
    add_rows,
    fetch_first_keys,
    multiplies_pairs,
    rows_kind,
    score_pairs,
    score_rows,
)
from octavo.kernels.cpu.compiled import Kernel, inlined
from octavo.kernels.cpu.intrinsics import (
    bits_to_f32,
    copy_bytes,
    keep_alive,
    load_f32,
    load_i64,
    store_f32,
)
from octavo.kernels.cpu.math import exp, tanh
from octavo.kernels.cpu.numbers import (
    CODES,
    F32,
    float_bits,
    store_row,
    token_rows,
    widen_row,
)
from octavo.kernels.cpu.pool import shared_pool
from octavo.kernels.cpu.softmax import NONE_SEEN, softmax_row, softmax_row_bf16
from octavo.kernels.cpu.tile import DOT_KEYS

_TILE_ROWS = 48
# Chunks of work, about; enough for threads to end together.
_CHUNKS = 12
_NONE_SEEN = np.float32(NONE_SEEN)
_LOG2_E, _LN_2 = np.float32(1 / math.log(2)), np.float32(math.log(2))
_ZERO, _ONE = np.float32(0), np.float32(1)


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

    It reads four keys of a block and eight components of a key at a time, and of values a panel.

    Where a size does not fill a panel it may touch the rows after, in pairs of bfloat16 those of
    keys too: memory must be readable for 128 bytes after the last row.
    """
    _, _, block_size, size = key_cache.shape
    return key_cache.dtype == dtype and size % 8 == 0 and block_size >= DOT_KEYS


def _int32(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()


@inlined
def _cap_scores(row: int, count: int, scale: np.float32, soft_cap: np.float32) -> None:
    for i in range(count):
        store_f32(row, i, soft_cap * tanh(load_f32(row, i) * scale / soft_cap))


@inlined
def _load_queries(code: int, in_pairs: bool, a: int, f: int) -> None:
    """Queries as their products read them; sums and totals set to zero."""
    size = load_i64(a, SIZE)
    width, item = padded(size), 4 if code == F32 else 2
    for row in range(load_i64(f, ROWS)):
        token, head = head_row(a, f, row)
        source = load_i64(a, Q) + token * load_i64(a, Q_STRIDE) + head * size * item
        if in_pairs:
            copy_bytes(load_i64(f, QUERIES) + row * size * 2, source, size * 2)
        else:
            widen_row(code, source, load_i64(f, QUERIES) + row * size * 4, size)
        for i in range(width):
            store_f32(load_i64(f, SUMS), row * width + i, _ZERO)
        store_f32(load_i64(f, STATE), 2 * row, _NONE_SEEN)
        store_f32(load_i64(f, STATE), 2 * row + 1, _ZERO)


def _weigher(in_pairs: bool) -> Any:
    softmax = softmax_row_bf16 if in_pairs else softmax_row
    # Weights in float32 take the place of the scores.
    weights_at, weight_bytes = (WEIGHTS, WEIGHT_BYTES) if in_pairs else (SCORES, SCORE_BYTES)

    @inlined
    def weigh_span(a: int, f: int, here: int, count: int) -> None:
        """Softmax over what each row sees of the span; the sums before it are rescaled."""
        group = load_i64(a, Q_HEADS) // load_i64(a, KV_HEADS)
        width, window = padded(load_i64(a, SIZE)), load_i64(a, WINDOW)
        scale, soft_cap = bits_to_f32(load_i64(a, SCALE)), bits_to_f32(load_i64(a, SOFT_CAP))
        for row in range(load_i64(f, ROWS)):
            query = load_i64(f, POSITION) + row // group - here
            first = min(count, max(0, query - window + 1)) if window > 0 else 0
            end = max(first, min(count, query + 1))
            scores = load_i64(f, SCORES) + row * SCORE_BYTES
            weights = load_i64(f, weights_at) + row * weight_bytes
            state = load_i64(f, STATE) + 8 * row
            factor = scale * _LOG2_E
            if soft_cap != _ZERO:
                _cap_scores(scores, count, scale, soft_cap)
                factor = _LOG2_E
            before = load_f32(state, 0)
            largest, total = softmax(scores, first, end, count, factor, before, weights)
            kept = exp((before - largest) * _LN_2)
            store_f32(state, 0, largest)
            store_f32(state, 1, load_f32(state, 1) * kept + total)
            if kept != _ONE:
                sums = load_i64(f, SUMS) + row * width * 4
                for i in range(width):
                    store_f32(sums, i, load_f32(sums, i) * kept)

    return weigh_span


# Not closures of the kernels: Numba would not know those again at the next start.
_weigh_pairs, _weigh_rows = _weigher(True), _weigher(False)


@inlined
def _store_rows(code: int, a: int, f: int) -> None:
    """Sums over totals, in the dtype of the output; zeros where nothing was seen."""
    size = load_i64(a, SIZE)
    for row in range(load_i64(f, ROWS)):
        total = load_f32(load_i64(f, STATE), 2 * row + 1)
        inverse = _ZERO if total == _ZERO else np.float32(1) / total
        sums = load_i64(f, SUMS) + row * padded(size) * 4
        for i in range(size):
            store_f32(sums, i, load_f32(sums, i) * inverse)
        token, head = head_row(a, f, row)
        wide = load_i64(a, WIDE_OUT)
        item = 2 if code != F32 and wide == 0 else 4
        target = load_i64(a, OUT) + (token * load_i64(a, Q_HEADS) + head) * size * item
        store_row(code, wide, sums, target, size)


@inlined
def _span_after(a: int, own: tuple[int, int, int], following: int) -> tuple[int, int]:
    """The item's frame and first key of the next span: of this item, or of the one `following`.

    `own` is this item's frame, its next key and its end; a frame of 0 is none.
    """
    f, here, end = own
    if here < end:
        return f, here
    return (following, first_key(a, following)) if following != 0 else (0, 0)


def _attention_kernel(kind: int) -> Callable[[Any, Any], None]:
    """The kernel for tensors of element type `kind`."""
    in_pairs, values_kind = multiplies_pairs(kind), rows_kind(kind)

    def attention(a: Any, chunk: Any) -> None:
        frame = np.empty(2 * FRAME_WORDS, np.int64)
        f, following = frame.ctypes.data, frame.ctypes.data + 8 * FRAME_WORDS
        memory = np.empty(item_bytes(a), np.uint8)
        item = chunk * load_i64(a, PER_CHUNK)
        end_item = item + load_i64(a, PER_CHUNK)
        found = locate(a, f, item)
        if found:
            fetch_first_keys(kind, a, f, first_key(a, f))
        while found:
            lay_out(a, f, memory.ctypes.data)
            _load_queries(kind, in_pairs, a, f)
            item += 1
            # The first of the next chunk too: most often it is this thread's.
            follows = locate(a, following, item)
            here, end = first_key(a, f), load_i64(f, POSITION) + load_i64(f, TOKENS)
            while here < end:
                count = min(SPAN, end - here)
                if in_pairs:
                    right = score_pairs(a, f, here, count)
                else:
                    right = score_rows(kind, a, f, here, count)
                if not right:
                    return
                if in_pairs:
                    _weigh_pairs(a, f, here, count)
                else:
                    _weigh_rows(a, f, here, count)
                after = _span_after(a, (f, here + count, end), following if follows else 0)
                if in_pairs:
                    add_pairs(a, f, (here, count), after)
                else:
                    add_rows(kind, values_kind, a, f, (here, count), after)
                here += count
            _store_rows(kind, a, f)
            found = follows and item < end_item
            f, following = following, f
        keep_alive(frame)
        keep_alive(memory)

    return attention


ATTENTION = {dtype: Kernel(_attention_kernel(code)) for dtype, code in CODES.items()}
