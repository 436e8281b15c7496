# ruff: noqa: ANN401, PLR0913  # Numba and llvmlite have no types; kernels take addresses and sizes
"""Attention's products for a few query rows: pairs of bfloat16 are formed in registers.

A decoding sequence brings as many rows as query heads share a KV head. For so few, turning a span
into panels in memory takes longer than the products with them. Sums are formed in the same order
as there, so a row's results do not depend on the form.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.kernels.cpu.emission import emit_loop, emit_store, whole
from octavo.kernels.cpu.intrinsics import (
    SECOND_CACHE,
    Typed,
    declared,
    emit_load,
    emit_prefetch,
)
from octavo.kernels.cpu.span_panels import KEYS_AT_ONCE, emit_pairs, emit_transposed, rows_at
from octavo.kernels.cpu.tile import PAIRS_OF_BF16, broadcast, emit_switch

FEW_ROWS = 8

_I64 = ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), KEYS_AT_ONCE)
_WORDS = ir.VectorType(ir.IntType(32), KEYS_AT_ONCE)
_ROW = ir.VectorType(ir.IntType(16), 2 * KEYS_AT_ONCE)
_HALF_BYTES = 4 * KEYS_AT_ONCE


def _add_products(builder: Any, total: Any, pair: Any, pairs: Any) -> Any:
    """total + the product of one pair, at address `pair`, with each of `pairs`."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    combine = declared(builder, name, _FLOATS, [_FLOATS, PAIRS_OF_BF16, PAIRS_OF_BF16])
    operands = [broadcast(builder, pair, _WORDS), pairs]
    return builder.call(combine, [total, *(builder.bitcast(x, PAIRS_OF_BF16) for x in operands)])


def _strided(builder: Any, address: Any, stride: Any, count: int) -> list[Any]:
    return [builder.add(address, builder.mul(stride, whole(i))) for i in range(count)]


def _emit_scores(builder: Any, rows: int, args: Any) -> None:
    queries, query_stride, keys, values, offsets, words, out, out_stride = args
    key_rows = rows_at(builder, keys, offsets, KEYS_AT_ONCE)
    value_rows = rows_at(builder, values, offsets, KEYS_AT_ONCE)
    query_rows = _strided(builder, queries, query_stride, rows)

    def add_words(first: Any, sums: list[Any]) -> list[Any]:
        offset = builder.mul(first, whole(4))
        loaded = [emit_load(builder, builder.add(row, offset), _WORDS, 2) for row in key_rows]
        for row in value_rows:
            emit_prefetch(builder, builder.add(row, offset), SECOND_CACHE)
        for i, pairs in enumerate(emit_transposed(builder, loaded)):
            word = builder.add(offset, whole(4 * i))
            for r, row in enumerate(query_rows):
                sums[r] = _add_products(builder, sums[r], builder.add(row, word), pairs)
        return sums

    zero = ir.Constant(_FLOATS, [0.0] * KEYS_AT_ONCE)
    sums = emit_loop(builder, words, KEYS_AT_ONCE, [zero] * rows, add_words)
    for total, place in zip(sums, _strided(builder, out, out_stride, rows), strict=True):
        emit_store(builder, total, place)


@intrinsic
def score_few(
    typingctx: Any,
    rows: Any,
    queries: Any,
    query_stride: Any,
    keys: Any,
    values: Any,
    offsets: Any,
    words: Any,
    out: Any,
    out_stride: Any,
) -> Typed:
    """out[rows, 16] = queries[rows, D] x the transposed keys[16, D]; out float32, rows 1 to 8.

    `offsets` is the address of the 16 offsets in bytes, from `keys`, of rows of `words` pairs, a
    multiple of 16. The values at the same offsets from `values` are fetched. Strides in bytes.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_switch(
            builder, args[0], FEW_ROWS, lambda count: _emit_scores(builder, count, args[1:])
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


def _emit_values(builder: Any, rows: int, args: Any) -> None:
    weights, weight_stride, values, offsets, pairs, sums, sum_stride = args
    weight_rows = _strided(builder, weights, weight_stride, rows)
    places = [
        builder.add(row, whole(_HALF_BYTES * half))
        for row in _strided(builder, sums, sum_stride, rows)
        for half in (0, 1)
    ]

    def add_pair(pair: Any, totals: list[Any]) -> list[Any]:
        here = builder.add(offsets, builder.mul(pair, whole(16)))
        both = [emit_load(builder, row, _ROW, 2) for row in rows_at(builder, values, here, 2)]
        halves = emit_pairs(builder, *both)
        word = builder.mul(pair, whole(4))
        for r, row in enumerate(weight_rows):
            at = builder.add(row, word)
            for half in (0, 1):
                place = 2 * r + half
                totals[place] = _add_products(builder, totals[place], at, halves[half])
        return totals

    start = [emit_load(builder, place, _FLOATS, 4) for place in places]
    for place, total in zip(places, emit_loop(builder, pairs, 1, start, add_pair), strict=True):
        emit_store(builder, total, place)


@intrinsic
def add_few(
    typingctx: Any,
    rows: Any,
    weights: Any,
    weight_stride: Any,
    values: Any,
    offsets: Any,
    pairs: Any,
    sums: Any,
    sum_stride: Any,
) -> Typed:
    """sums[rows, 32] += weights[rows, 2 x pairs] x values[2 x pairs, 32]; rows 1 to 8, pairs > 0.

    `offsets` is the address of the values' offsets in bytes from `values`. Sums are float32, the
    rest bfloat16. Strides in bytes.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_switch(
            builder, args[0], FEW_ROWS, lambda count: _emit_values(builder, count, args[1:])
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen
