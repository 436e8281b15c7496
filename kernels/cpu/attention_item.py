"""An item of attention's work: one KV head for a tile of query tokens of one sequence.

What is fixed for an item is kept in a frame of int64.
"""

from octavo.kernels.cpu.compiled import inlined
from octavo.kernels.cpu.intrinsics import load_i32, load_i64, store_i64
from octavo.kernels.cpu.pool import report
from octavo.kernels.cpu.processor import PANEL

SPAN = 128
# Where a span begins within a block, scores step back before its first column.
_MARGIN_BYTES = 16
SCORE_BYTES = 4 * SPAN + 2 * _MARGIN_BYTES
WEIGHT_BYTES = 2 * SPAN

# The kernel's arguments, in this order.
(
    Q,
    Q_STRIDE,
    KEYS,
    VALUES,
    TABLES,
    TABLE_STRIDE,
    LENGTHS,
    STARTS,
    SEQUENCES,
    Q_HEADS,
    KV_HEADS,
    BLOCK_SIZE,
    SIZE,
    BLOCKS,
    OUT,
    SCALE,
    WINDOW,
    SOFT_CAP,
    PER_TILE,
    TABLE_COLUMNS,
    WIDE_OUT,
    PER_CHUNK,
) = range(22)

# The words of a frame: KV head, the sequence's block table, the row in q of the first token, that
# token's position, the number of tokens and of query rows; then the addresses of queries [rows, D],
# sums [rows, D padded], scores, and (largest, total) of each row, all float32, the largest score
# times log2(e). Where products take pairs of bfloat16, queries are bfloat16, and there are weights
# [rows, span] of bfloat16, the offsets of a span's cache rows, and a place for keys and values in
# panels.
(
    HEAD,
    TABLE,
    TOKEN,
    POSITION,
    TOKENS,
    ROWS,
    QUERIES,
    SUMS,
    SCORES,
    STATE,
    WEIGHTS,
    OFFSETS,
    PANELS,
) = range(13)
FRAME_WORDS = 13


@inlined
def padded(size: int) -> int:
    """Components of a head, to whole panels."""
    return (size + PANEL - 1) // PANEL * PANEL


@inlined
def locate(a: int, f: int, item: int) -> bool:
    """Fill the first part of the frame `f`; False past the last tile of queries."""
    per_tile, starts, kv_heads = (
        load_i64(a, PER_TILE),
        load_i64(a, STARTS),
        load_i64(a, KV_HEADS),
    )
    number = item // kv_heads
    for sequence in range(load_i64(a, SEQUENCES)):
        start = load_i32(starts, sequence)
        queries = load_i32(starts, sequence + 1) - start
        tiles = (queries + per_tile - 1) // per_tile
        if number < tiles:
            first = number * per_tile
            tokens = min(per_tile, queries - first)
            position = load_i32(load_i64(a, LENGTHS), sequence) - queries + first
            stride = load_i64(a, TABLE_STRIDE)
            store_i64(f, HEAD, item % kv_heads)
            store_i64(f, TABLE, load_i64(a, TABLES) + sequence * stride * 4)
            store_i64(f, TOKEN, start + first)
            store_i64(f, POSITION, position)
            store_i64(f, TOKENS, tokens)
            store_i64(f, ROWS, tokens * (load_i64(a, Q_HEADS) // kv_heads))
            if position + tokens > load_i64(a, TABLE_COLUMNS) * load_i64(a, BLOCK_SIZE):
                report(a, 1)
                return False
            return True
        number -= tiles
    return False


@inlined
def item_bytes(a: int) -> int:
    """Memory that the largest item needs."""
    rows = load_i64(a, PER_TILE) * (load_i64(a, Q_HEADS) // load_i64(a, KV_HEADS))
    size = load_i64(a, SIZE)
    row_bytes = size * 4 + padded(size) * 4 + 8 + SCORE_BYTES + WEIGHT_BYTES
    count: int = rows * row_bytes + 8 * SPAN + 2 * SPAN * padded(size) + 128
    return count


@inlined
def lay_out(a: int, f: int, memory: int) -> None:
    """Fill the second part of the frame: where an item's numbers lie."""
    rows, size = load_i64(f, ROWS), load_i64(a, SIZE)
    store_i64(f, PANELS, (memory + 63) // 64 * 64)
    store_i64(f, OFFSETS, load_i64(f, PANELS) + 2 * SPAN * padded(size))
    store_i64(f, QUERIES, load_i64(f, OFFSETS) + 8 * SPAN)
    store_i64(f, SUMS, load_i64(f, QUERIES) + rows * size * 4)
    store_i64(f, STATE, load_i64(f, SUMS) + rows * padded(size) * 4)
    store_i64(f, WEIGHTS, load_i64(f, STATE) + rows * 8)
    store_i64(f, SCORES, load_i64(f, WEIGHTS) + rows * WEIGHT_BYTES + _MARGIN_BYTES)


@inlined
def first_key(a: int, f: int) -> int:
    """Where the first span of an item begins.

    Spans begin at multiples of their length, so a query's sums never depend on the step.
    """
    window = load_i64(a, WINDOW)
    if window == 0:
        return 0
    first: int = max(0, load_i64(f, POSITION) - window + 1) // SPAN * SPAN
    return first


@inlined
def head_row(a: int, f: int, row: int) -> tuple[int, int]:
    """(token, query head) of a query row."""
    group = load_i64(a, Q_HEADS) // load_i64(a, KV_HEADS)
    return load_i64(f, TOKEN) + row // group, load_i64(f, HEAD) * group + row % group


@inlined
def cache_row(a: int, f: int, position: int) -> int:
    """Row of a key in the cache seen as [blocks * Hkv * block_size, D]; -1 for a wrong block."""
    block_size = load_i64(a, BLOCK_SIZE)
    block = load_i32(load_i64(f, TABLE), position // block_size)
    if block < 0 or block >= load_i64(a, BLOCKS):
        report(a, 1)
        return -1
    heads = block * load_i64(a, KV_HEADS) + load_i64(f, HEAD)
    row: int = heads * block_size + position % block_size
    return row
