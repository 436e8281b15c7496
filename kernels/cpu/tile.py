# ruff: noqa: ANN401, PLR0913  # Numba and llvmlite have no types; kernels take addresses and sizes
"""The core of all matrix products here: one tile of C = A x W, emitted as LLVM IR.

W is stored in panels of `PANEL` columns, so that one row of a panel fills two registers:

    bfloat16  [K / 2][PANEL][2]   rows k and k + 1 side by side: what a dot product of pairs
                                  takes; widening is a shift for the one, a mask for the other
    float16   [K][PANEL]
    float32   [K][PANEL]

`BF16_ROWS` reads bfloat16 rows as they lie in the KV cache instead, `INT8` panels of whole
numbers with scales, see `int8_tile`.

Plain Numba loops reach a quarter of this speed: LLVM neither keeps the accumulators in
registers nor chooses this order of loops by itself.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.kernels.cpu.emission import emit_spread
from octavo.kernels.cpu.int8_tile import emit_int8_tile
from octavo.kernels.cpu.intrinsics import (
    Typed,
    bf16_to_f32,
    declared,
    emit_load,
    emit_prefetch,
    pointer,
)
from octavo.kernels.cpu.numbers import BF16, F16, F32
from octavo.kernels.cpu.processor import HAS_BF16_DOT, LANES, MAX_ROWS, PANEL

BF16_ROWS = 3
INT8 = 4
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(_I32, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)


class BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


PAIRS_OF_BF16 = ir.VectorType(BFloat(), 2 * LANES)


def rows_code(kind: int) -> int:
    """Element type of the rows A that products with weights of a float `kind` read."""
    return BF16 if kind == BF16 and HAS_BF16_DOT else F32


def broadcast(builder: Any, address: Any, vector: ir.VectorType) -> Any:
    """The number at `address` in all lanes."""
    return emit_spread(builder, emit_load(builder, address, vector.element, 4), vector)


_STORED = {F32: 4, F16: 2, BF16_ROWS: 2, BF16: 4}
"""Bytes of a column in a row of a stored panel."""


def _weights(builder: Any, kind: int, address: Any) -> list[Any]:
    """The float32 rows of one half of W that a step consumes: two for bfloat16, else one."""
    if kind == F32:
        return [emit_load(builder, address, _VECTOR, 4)]
    if kind == F16:
        return [builder.fpext(emit_load(builder, address, _HALVES, 2), _VECTOR)]
    if kind == BF16_ROWS:
        return [bf16_to_f32(builder, emit_load(builder, address, _SHORTS, 2), _WORDS, _VECTOR)]
    words = emit_load(builder, address, _WORDS, 4)
    even = builder.shl(words, ir.Constant(_WORDS, [16] * LANES))
    odd = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
    return [builder.bitcast(even, _VECTOR), builder.bitcast(odd, _VECTOR)]


def _emit_step(builder: Any, kind: int, w: Any, a_rows: list[Any], sums: list[Any]) -> list[Any]:
    """The sums after one more row of the stored panel at `w`, with A from the addresses.

    Sums are those of the first half of the panel for each row, then of the second.
    """
    halves = [builder.add(w, ir.Constant(_I64, half * LANES * _STORED[kind])) for half in (0, 1)]
    if rows_code(kind) == BF16:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        combine = declared(builder, name, _VECTOR, [_VECTOR, PAIRS_OF_BF16, PAIRS_OF_BF16])
        parts = [[emit_load(builder, half, _WORDS, 4)] for half in halves]
        element, operand = _WORDS, PAIRS_OF_BF16
    else:
        name = f"llvm.fma.v{LANES}f32"
        combine = declared(builder, name, _VECTOR, [_VECTOR] * 3)
        parts = [_weights(builder, kind, half) for half in halves]
        element, operand = _VECTOR, _VECTOR
    new = list(sums)
    for k in range(len(parts[0])):
        for r, row in enumerate(a_rows):
            at = builder.add(row, ir.Constant(_I64, 4 * k))
            number = builder.bitcast(broadcast(builder, at, element), operand)
            for half in (0, 1):
                place = half * len(a_rows) + r
                weights = builder.bitcast(parts[half][k], operand)
                new[place] = _combined(builder, combine, new[place], number, weights)
    return new


def _combined(builder: Any, combine: Any, total: Any, number: Any, weights: Any) -> Any:
    """total + number * weights; the dot product takes the total first."""
    first = [total, number, weights] if weights.type == PAIRS_OF_BF16 else [number, weights, total]
    return builder.call(combine, first)


def emit_tile(
    builder: Any, kind: int, rows: int, args: Any, accumulate: bool = False, fetches: bool = True
) -> None:
    """See `gemm_tile`, whose last nine arguments are `args`; `kind` is none of whole numbers."""
    a, stride, w, w_stride, steps, fetch, fetch_stride, c, c_stride = args
    # A pair of bfloat16 is as long as one float32.
    step_bytes = 8 if kind == BF16 and rows_code(kind) == F32 else 4
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    a_rows = [builder.add(a, builder.mul(stride, ir.Constant(_I64, r))) for r in range(rows)]
    places = [
        builder.add(
            c, builder.add(builder.mul(c_stride, ir.Constant(_I64, r)), ir.Constant(_I64, at))
        )
        for at in (0, 4 * LANES)
        for r in range(rows)
    ]
    start = [emit_load(builder, place, _VECTOR, 4) if accumulate else zero for place in places]

    entry = builder.block
    loop = builder.append_basic_block("tile.loop")
    done = builder.append_basic_block("tile.done")
    builder.cbranch(builder.icmp_signed(">", steps, ir.Constant(_I64, 0)), loop, done)

    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(ir.Constant(_I64, 0), entry)
    sums = []
    for value in start:
        phi = builder.phi(_VECTOR)
        phi.add_incoming(value, entry)
        sums.append(phi)
    here = builder.add(w, builder.mul(index, w_stride))
    fetched = builder.add(fetch, builder.mul(index, fetch_stride))
    lines = PANEL * _STORED[kind] // 64
    for line in range(lines if fetches else 0):
        part = builder.sdiv(
            builder.mul(fetch_stride, ir.Constant(_I64, line)), ir.Constant(_I64, lines)
        )
        emit_prefetch(builder, builder.add(fetched, part))
    offset = builder.mul(index, ir.Constant(_I64, step_bytes))
    new = _emit_step(builder, kind, here, [builder.add(row, offset) for row in a_rows], sums)
    following = builder.add(index, ir.Constant(_I64, 1))
    index.add_incoming(following, loop)
    for phi, value in zip(sums, new, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)

    builder.position_at_end(done)
    final = []
    for before, value in zip(start, new, strict=True):
        phi = builder.phi(_VECTOR)
        phi.add_incoming(before, entry)
        phi.add_incoming(value, loop)
        final.append(phi)
    for place, value in zip(places, final, strict=True):
        builder.store(value, pointer(builder, place, _VECTOR)).align = 4


@intrinsic(prefer_literal=True)
def gemm_tile(
    typingctx: Any,
    kind: Any,
    accumulate: Any,
    rows: Any,
    a: Any,
    a_stride: Any,
    w: Any,
    w_stride: Any,
    steps: Any,
    fetch: Any,
    fetch_stride: Any,
    c: Any,
    c_stride: Any,
) -> Typed:
    """C[rows, PANEL] = (C if accumulate) + A[rows, K] x panel; rows 1 to `MAX_ROWS`, C float32.

    A has the element type `rows_code(kind)`; `kind` and `accumulate` are literals. Strides are in
    bytes; `steps` counts rows of the stored panel (K, or K / 2 for bfloat16), which lie `w_stride`
    apart. Each step asks for the cache lines of `fetch_stride` bytes from `fetch`, which moves on
    by as much; of none where that is a literal, 0. For `INT8`, which cannot accumulate, A is
    quantized and steps are groups.
    """
    if not all(isinstance(item, types.IntegerLiteral) for item in (kind, accumulate)):
        return None  # type: ignore[return-value]  # Numba then reports the wrong types
    kind_value, accumulate_value = kind.literal_value, bool(accumulate.literal_value)
    fetches = not isinstance(fetch_stride, types.IntegerLiteral)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def emit(count: int) -> None:
            if kind_value == INT8:
                emit_int8_tile(builder, count, args[3:])
            else:
                emit_tile(builder, kind_value, count, args[3:], accumulate_value, fetches)

        emit_switch(builder, args[2], MAX_ROWS, emit)
        return context.get_dummy_value()

    return types.void(kind, accumulate, *[types.int64] * 10), codegen


def emit_switch(builder: Any, rows: Any, most: int, emit: Callable[[int], None]) -> None:
    """One variant of the code for each number of rows, 1 to `most`."""
    after = builder.append_basic_block("tile.after")
    variants = [builder.append_basic_block(f"tile.{n}") for n in range(1, most + 1)]
    switch = builder.switch(rows, variants[-1])
    for count, variant in enumerate(variants, 1):
        if count < most:
            switch.add_case(ir.Constant(_I64, count), variant)
        builder.position_at_end(variant)
        emit(count)
        builder.branch(after)
    builder.position_at_end(after)


_DOT_LANES = 8
DOT_KEYS = 4
DOT_ROWS = 3
_LANE_VECTOR = ir.VectorType(_FLOAT, _DOT_LANES)
_LANE_LOADS = {
    BF16: ir.VectorType(ir.IntType(16), _DOT_LANES),
    F16: ir.VectorType(ir.HalfType(), _DOT_LANES),
    F32: _LANE_VECTOR,
}


def _load_lanes(builder: Any, kind: int, address: Any) -> Any:
    value = emit_load(builder, address, _LANE_LOADS[kind], 2)
    if kind == BF16:
        return bf16_to_f32(builder, value, ir.VectorType(_I32, _DOT_LANES), _LANE_VECTOR)
    return builder.fpext(value, _LANE_VECTOR) if kind == F16 else value


# The pairs that the processor's horizontal addition of two vectors of eight takes.
_PAIRS = [0, 2, 8, 10, 4, 6, 12, 14]


def _add_lanes(builder: Any, first: Any, second: Any, lanes: list[int], apart: int) -> Any:
    """Of both vectors side by side, `lanes` plus the lanes `apart` places further."""

    def chosen(shift: int) -> Any:
        mask = ir.Constant(ir.VectorType(_I32, len(lanes)), [lane + shift for lane in lanes])
        return builder.shuffle_vector(first, second, mask)

    # The kernel's own flags would let LLVM choose another order for another number of rows.
    return builder.fadd(chosen(0), chosen(apart), flags=("nsz",))


def _sums_of_four(builder: Any, vectors: list[Any]) -> Any:
    """The sums over each of four vectors of eight: [4]."""
    low = _add_lanes(builder, vectors[0], vectors[1], _PAIRS, 1)
    high = _add_lanes(builder, vectors[2], vectors[3], _PAIRS, 1)
    halves = _add_lanes(builder, low, high, _PAIRS, 1)
    return _add_lanes(builder, halves, halves, [0, 1, 2, 3], 4)


def _emit_dots(builder: Any, kind: int, rows: int, args: Any) -> None:
    q, q_stride, keys, key_stride, steps, out, out_stride = args
    fma = declared(builder, f"llvm.fma.v{_DOT_LANES}f32", _LANE_VECTOR, [_LANE_VECTOR] * 3)
    entry = builder.block
    loop = builder.append_basic_block("dots.loop")
    done = builder.append_basic_block("dots.done")
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(ir.Constant(_I64, 0), entry)
    sums = [builder.phi(_LANE_VECTOR) for _ in range(rows * DOT_KEYS)]
    size = 4 if kind == F32 else 2
    key_offset = builder.mul(index, ir.Constant(_I64, _DOT_LANES * size))
    q_offset = builder.mul(index, ir.Constant(_I64, _DOT_LANES * 4))
    vectors = []
    for key in range(DOT_KEYS):
        row = builder.add(keys, builder.mul(key_stride, ir.Constant(_I64, key)))
        vectors.append(_load_lanes(builder, kind, builder.add(row, key_offset)))
    new = []
    for r in range(rows):
        row = builder.add(q, builder.mul(q_stride, ir.Constant(_I64, r)))
        q_lanes = emit_load(builder, builder.add(row, q_offset), _LANE_VECTOR, 4)
        for key in range(DOT_KEYS):
            new.append(builder.call(fma, [q_lanes, vectors[key], sums[r * DOT_KEYS + key]]))
    following = builder.add(index, ir.Constant(_I64, 1))
    index.add_incoming(following, loop)
    for phi, value in zip(sums, new, strict=True):
        phi.add_incoming(ir.Constant(_LANE_VECTOR, [0.0] * _DOT_LANES), entry)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)

    builder.position_at_end(done)
    for r in range(rows):
        row = builder.add(out, builder.mul(out_stride, ir.Constant(_I64, r)))
        totals = _sums_of_four(builder, new[r * DOT_KEYS : (r + 1) * DOT_KEYS])
        store = builder.store(totals, pointer(builder, row, totals.type))
        store.align = 4


@intrinsic(prefer_literal=True)
def dot_tile(
    typingctx: Any,
    kind: Any,
    rows: Any,
    q: Any,
    q_stride: Any,
    keys: Any,
    key_stride: Any,
    steps: Any,
    out: Any,
    out_stride: Any,
) -> Typed:
    """out[rows, 4] = Q[rows, D] x the transposed keys[4, D]; Q and out float32, rows 1 to 3.

    `kind`, the element type of the keys, is a literal; strides in bytes; `steps` is D / 8.
    """
    if not isinstance(kind, types.IntegerLiteral):
        return None  # type: ignore[return-value]  # Numba then reports the wrong types

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def emit(count: int) -> None:
            _emit_dots(builder, kind.literal_value, count, args[2:])

        emit_switch(builder, args[1], DOT_ROWS, emit)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 8), codegen
