"""Products of an item's queries with a span of keys and values.

Two forms, taken by what the processor has. Either keys and values are widened in registers as they
lie in the cache, or pairs of bfloat16 are multiplied: for a few query rows they are formed in
registers, for more a span is first turned into panels.
Reading the cache takes longer than computing: while scores are computed the values of the span
are fetched, and with the values the keys of the span, or of the item, after.
"""

from numba import literally

from octavo.kernels.cpu.attention_item import (
    BLOCK_SIZE,
    KEYS,
    OFFSETS,
    PANELS,
    POSITION,
    QUERIES,
    ROWS,
    SCORE_BYTES,
    SCORES,
    SIZE,
    SPAN,
    SUMS,
    TOKENS,
    VALUES,
    WEIGHT_BYTES,
    WEIGHTS,
    cache_row,
    padded,
)
from octavo.kernels.cpu.compiled import inlined
from octavo.kernels.cpu.fetch import fetch
from octavo.kernels.cpu.few_rows import FEW_ROWS, add_few, score_few
from octavo.kernels.cpu.intrinsics import load_i64, store_i64
from octavo.kernels.cpu.numbers import BF16, F32
from octavo.kernels.cpu.processor import HAS_BF16_DOT, MAX_ROWS, PANEL
from octavo.kernels.cpu.span_panels import KEYS_AT_ONCE, pair_values, transpose_keys
from octavo.kernels.cpu.tile import BF16_ROWS, DOT_KEYS, DOT_ROWS, dot_tile, gemm_tile

_PAIRS_AT_ONCE = KEYS_AT_ONCE // 2


def multiplies_pairs(kind: int) -> bool:
    """Whether products over a cache of element type `kind` are those of pairs."""
    return HAS_BF16_DOT and kind == BF16


def rows_kind(kind: int) -> int:
    """How `gemm_tile` reads values of element type `kind` as they lie in the cache."""
    return BF16_ROWS if kind == BF16 else kind


@inlined
def _fetch_keys(a: int, f: int, key: int, count: int, key_bytes: int) -> None:
    """Have `count` keys from `key` brought near, of those in its block that the item reads."""
    if f == 0 or key >= load_i64(f, POSITION) + load_i64(f, TOKENS):
        return
    row = cache_row(a, f, key)
    if row >= 0:
        in_block = load_i64(a, BLOCK_SIZE) - key % load_i64(a, BLOCK_SIZE)
        fetch(load_i64(a, KEYS) + row * key_bytes, min(count, in_block) * key_bytes)


@inlined
def fetch_first_keys(code: int, a: int, f: int, key: int) -> None:
    """Have the keys of an item's first span, from `key` on, brought near."""
    block_size, key_bytes = load_i64(a, BLOCK_SIZE), load_i64(a, SIZE) * (4 if code == F32 else 2)
    for column in range(0, SPAN, block_size):
        _fetch_keys(a, f, key + column, block_size, key_bytes)


@inlined
def _fetch_share(
    code: int, a: int, following: tuple[int, int], done: tuple[int, int], step: int
) -> None:
    """Have the next share of the span after this brought near, `step` keys or several times that.

    `done` tells how many of this span's keys have been worked on, and how many it has.
    """
    f, first = following
    here, count = done
    key_bytes, block_size = load_i64(a, SIZE) * (4 if code == F32 else 2), load_i64(a, BLOCK_SIZE)
    for key in range(here, SPAN, (count + step - 1) // step * step):
        for part in range(0, step, block_size):
            _fetch_keys(a, f, first + key + part, step, key_bytes)


@inlined
def score_rows(code: int, a: int, f: int, here: int, count: int) -> bool:
    """Scores of all rows with the keys `here` ... `here + count`; False for a wrong block."""
    size, block_size = load_i64(a, SIZE), load_i64(a, BLOCK_SIZE)
    rows, queries = load_i64(f, ROWS), load_i64(f, QUERIES)
    key_bytes = size * (4 if code == F32 else 2)
    column = 0
    next_row = cache_row(a, f, here)
    while column < count:
        row_in_cache = next_row
        if row_in_cache < 0:
            return False
        keys = load_i64(a, KEYS) + row_in_cache * key_bytes
        in_block = block_size - (here + column) % block_size
        take = min(in_block, count - column)
        if column + take < count:
            next_row = cache_row(a, f, here + column + take)
        for start in range(0, take, DOT_KEYS):
            # At the end of a block step back rather than read past it.
            key = min(start, in_block - DOT_KEYS)
            fetch(load_i64(a, VALUES) + (row_in_cache + key) * key_bytes, DOT_KEYS * key_bytes)
            for row in range(0, rows, DOT_ROWS):
                dot_tile(
                    literally(code),
                    min(DOT_ROWS, rows - row),
                    queries + row * size * 4,
                    size * 4,
                    keys + key * key_bytes,
                    key_bytes,
                    size // 8,
                    load_i64(f, SCORES) + row * SCORE_BYTES + (column + key) * 4,
                    SCORE_BYTES,
                )
        column += take
    return True


@inlined
def add_rows(
    code: int,
    kind: int,
    a: int,
    f: int,
    span: tuple[int, int],
    following: tuple[int, int],
) -> None:
    """Add the weighted values of a span (first key, count) to the sums.

    `following` is the frame of the item with the next span, or 0, and the first key of that.
    """
    here, count = span
    size, block_size = load_i64(a, SIZE), load_i64(a, BLOCK_SIZE)
    rows, width = load_i64(f, ROWS), padded(load_i64(a, SIZE))
    item = 4 if code == F32 else 2
    column = 0
    while column < count:
        values = load_i64(a, VALUES) + cache_row(a, f, here + column) * size * item
        take = min(block_size - (here + column) % block_size, count - column)
        _fetch_share(code, a, following, (column, count), block_size)
        for row in range(0, rows, MAX_ROWS):
            for part in range(0, size, PANEL):
                gemm_tile(
                    literally(kind),
                    1,
                    min(MAX_ROWS, rows - row),
                    load_i64(f, SCORES) + row * SCORE_BYTES + column * 4,
                    SCORE_BYTES,
                    values + part * item,
                    size * item,
                    take,
                    values,
                    0,
                    load_i64(f, SUMS) + (row * width + part) * 4,
                    width * 4,
                )
        column += take


@inlined
def _find_rows(a: int, f: int, here: int, count: int, row_bytes: int) -> bool:
    """Offsets in the cache of the keys `here` ... `here + count`; False for a wrong block.

    Up to the end of a panel the last one is repeated.
    """
    block_size, offsets = load_i64(a, BLOCK_SIZE), load_i64(f, OFFSETS)
    column = 0
    while column < count:
        first = cache_row(a, f, here + column)
        if first < 0:
            return False
        take = min(block_size - (here + column) % block_size, count - column)
        for i in range(take):
            store_i64(offsets, column + i, (first + i) * row_bytes)
        column += take
    last = load_i64(offsets, count - 1)
    for i in range(count, (count + PANEL - 1) // PANEL * PANEL):
        store_i64(offsets, i, last)
    return True


@inlined
def _score_few(a: int, f: int, count: int) -> None:
    size = load_i64(a, SIZE)
    for column in range(0, count, KEYS_AT_ONCE):
        score_few(
            load_i64(f, ROWS),
            load_i64(f, QUERIES),
            size * 2,
            load_i64(a, KEYS),
            load_i64(a, VALUES),
            load_i64(f, OFFSETS) + 8 * column,
            size // 2,
            load_i64(f, SCORES) + 4 * column,
            SCORE_BYTES,
        )


@inlined
def score_pairs(a: int, f: int, here: int, count: int) -> bool:
    """As `score_rows`, in products of pairs of bfloat16."""
    size, rows, panel = load_i64(a, SIZE), load_i64(f, ROWS), load_i64(f, PANELS)
    if not _find_rows(a, f, here, count, 2 * size):
        return False
    if rows <= FEW_ROWS and size % PANEL == 0:
        _score_few(a, f, count)
        return True
    for column in range(0, count, PANEL):
        for half in range(0, PANEL, KEYS_AT_ONCE):
            offsets = load_i64(f, OFFSETS) + 8 * (column + half)
            transpose_keys(load_i64(a, KEYS), offsets, size // 2, panel + 4 * half)
            for key in range(KEYS_AT_ONCE):
                fetch(load_i64(a, VALUES) + load_i64(offsets, key), 2 * size)
        for row in range(0, rows, MAX_ROWS):
            gemm_tile(
                BF16,
                0,
                min(MAX_ROWS, rows - row),
                load_i64(f, QUERIES) + row * size * 2,
                size * 2,
                panel,
                4 * PANEL,
                size // 2,
                panel,
                0,
                load_i64(f, SCORES) + row * SCORE_BYTES + column * 4,
                SCORE_BYTES,
            )
    return True


@inlined
def _add_few(a: int, f: int, count: int, following: tuple[int, int]) -> None:
    rows, width, pairs = load_i64(f, ROWS), padded(load_i64(a, SIZE)), (count + 1) // 2
    for pair in range(0, pairs, _PAIRS_AT_ONCE):
        _fetch_share(BF16, a, following, (2 * pair, count), KEYS_AT_ONCE)
        for part in range(width // PANEL):
            add_few(
                rows,
                load_i64(f, WEIGHTS) + 4 * pair,
                WEIGHT_BYTES,
                load_i64(a, VALUES) + 2 * PANEL * part,
                load_i64(f, OFFSETS) + 16 * pair,
                min(_PAIRS_AT_ONCE, pairs - pair),
                load_i64(f, SUMS) + 4 * PANEL * part,
                width * 4,
            )


@inlined
def add_pairs(a: int, f: int, span: tuple[int, int], following: tuple[int, int]) -> None:
    """As `add_rows`, in products of pairs of bfloat16, weights too."""
    if load_i64(f, ROWS) <= FEW_ROWS:
        _add_few(a, f, span[1], following)
        return
    count = span[1]
    size, rows, panels = load_i64(a, SIZE), load_i64(f, ROWS), load_i64(f, PANELS)
    width = padded(size)
    pairs, parts, part_bytes = (count + 1) // 2, width // PANEL, SPAN // 2 * 4 * PANEL
    for pair in range(pairs):
        if pair % _PAIRS_AT_ONCE == 0:
            _fetch_share(BF16, a, following, (2 * pair, count), KEYS_AT_ONCE)
        offsets = load_i64(f, OFFSETS) + 16 * pair
        pair_values(load_i64(a, VALUES), offsets, parts, panels + pair * 4 * PANEL, part_bytes)
    for row in range(0, rows, MAX_ROWS):
        for part in range(parts):
            gemm_tile(
                BF16,
                1,
                min(MAX_ROWS, rows - row),
                load_i64(f, WEIGHTS) + row * WEIGHT_BYTES,
                WEIGHT_BYTES,
                panels + part * part_bytes,
                4 * PANEL,
                pairs,
                panels,
                0,
                load_i64(f, SUMS) + (row * width + part * PANEL) * 4,
                width * 4,
            )
