# ruff: noqa: ANN401, PLR0913  # Numba and llvmlite have no types; kernels take addresses and sizes
"""The core of all matrix products here: one tile of C = A x W, emitted as LLVM IR.

W is stored in panels of 16 columns, so that one row of a panel fills two AVX registers:

    bfloat16  [K / 2][16][2]   rows k and k + 1 side by side; widening is then a shift for
                               the one and a mask for the other, without a shuffle
    float16   [K][16]
    float32   [K][16]

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

from octavo.kernels.cpu.int8_tile import PANEL as PANEL
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

BF16_ROWS = 3
INT8 = 4
# Five rows of two registers, four for weights, a broadcast and a mask: all sixteen of AVX2.
MAX_ROWS = 5

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, PANEL)
_WORDS = ir.VectorType(_I32, PANEL)
_HALVES = ir.VectorType(ir.HalfType(), PANEL)
_SHORTS = ir.VectorType(ir.IntType(16), PANEL)


def _broadcast(builder: Any, address: Any) -> Any:
    scalar = emit_load(builder, address, _FLOAT, 4)
    single = builder.insert_element(
        ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0)
    )
    lanes = ir.Constant(ir.VectorType(_I32, PANEL), [0] * PANEL)
    return builder.shuffle_vector(single, ir.Constant(_VECTOR, ir.Undefined), lanes)


def _weights(builder: Any, kind: int, address: Any) -> list[Any]:
    """The float32 rows of W that one step consumes: two for bfloat16, else one."""
    if kind == F32:
        return [emit_load(builder, address, _VECTOR, 4)]
    if kind == F16:
        return [builder.fpext(emit_load(builder, address, _HALVES, 2), _VECTOR)]
    if kind == BF16_ROWS:
        return [bf16_to_f32(builder, emit_load(builder, address, _SHORTS, 2), _WORDS, _VECTOR)]
    words = emit_load(builder, address, _WORDS, 4)
    even = builder.shl(words, ir.Constant(_WORDS, [16] * PANEL))
    odd = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * PANEL))
    return [builder.bitcast(even, _VECTOR), builder.bitcast(odd, _VECTOR)]


def _emit_tile(builder: Any, kind: int, rows: int, accumulate: bool, args: Any) -> None:
    a, stride, w, w_stride, steps, fetch, fetch_stride, c, c_stride = args
    per_step = 2 if kind == BF16 else 1
    zero = ir.Constant(_VECTOR, [0.0] * PANEL)
    fma = declared(builder, f"llvm.fma.v{PANEL}f32", _VECTOR, [_VECTOR] * 3)
    c_rows = [builder.add(c, builder.mul(c_stride, ir.Constant(_I64, r))) for r in range(rows)]
    a_rows = [builder.add(a, builder.mul(stride, ir.Constant(_I64, r))) for r in range(rows)]
    start = [emit_load(builder, row, _VECTOR, 4) if accumulate else zero for row in c_rows]

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
    emit_prefetch(builder, builder.add(fetch, builder.mul(index, fetch_stride)))
    offset = builder.mul(index, ir.Constant(_I64, 4 * per_step))
    new = list(sums)
    for k, weight in enumerate(_weights(builder, kind, here)):
        for r in range(rows):
            at = builder.add(builder.add(a_rows[r], offset), ir.Constant(_I64, 4 * k))
            new[r] = builder.call(fma, [_broadcast(builder, at), weight, new[r]])
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
    for r in range(rows):
        store = builder.store(final[r], pointer(builder, c_rows[r], _VECTOR))
        store.align = 4


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
    """C[rows, 16] = (C if accumulate) + A[rows, K] x panel; A and C float32, rows 1 to 5.

    `kind` and `accumulate` are literals. Strides are in bytes; `steps` counts rows of the stored
    panel (K, or K / 2 for bfloat16), which lie `w_stride` apart. Each step asks for the cache
    line at `fetch`, which moves on by `fetch_stride`. For `INT8`, which cannot accumulate, A is
    quantized, steps are groups, and a step asks for `fetch_stride` bytes.
    """
    if not all(isinstance(item, types.IntegerLiteral) for item in (kind, accumulate)):
        return None  # type: ignore[return-value]  # Numba then reports the wrong types
    kind_value, accumulate_value = kind.literal_value, bool(accumulate.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def emit(count: int) -> None:
            if kind_value == INT8:
                emit_int8_tile(builder, count, args[3:])
            else:
                _emit_tile(builder, kind_value, count, accumulate_value, args[3:])

        _emit_switch(builder, args[2], MAX_ROWS, emit)
        return context.get_dummy_value()

    return types.void(kind, accumulate, *[types.int64] * 10), codegen


def _emit_switch(builder: Any, rows: Any, most: int, emit: Callable[[int], None]) -> None:
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


_LANES = 8
DOT_KEYS = 4
DOT_ROWS = 3
_LANE_VECTOR = ir.VectorType(_FLOAT, _LANES)
_LANE_LOADS = {
    BF16: ir.VectorType(ir.IntType(16), _LANES),
    F16: ir.VectorType(ir.HalfType(), _LANES),
    F32: _LANE_VECTOR,
}


def _load_lanes(builder: Any, kind: int, address: Any) -> Any:
    value = emit_load(builder, address, _LANE_LOADS[kind], 2)
    if kind == BF16:
        return bf16_to_f32(builder, value, ir.VectorType(_I32, _LANES), _LANE_VECTOR)
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
    fma = declared(builder, f"llvm.fma.v{_LANES}f32", _LANE_VECTOR, [_LANE_VECTOR] * 3)
    entry = builder.block
    loop = builder.append_basic_block("dots.loop")
    done = builder.append_basic_block("dots.done")
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(ir.Constant(_I64, 0), entry)
    sums = [builder.phi(_LANE_VECTOR) for _ in range(rows * DOT_KEYS)]
    size = 4 if kind == F32 else 2
    key_offset = builder.mul(index, ir.Constant(_I64, _LANES * size))
    q_offset = builder.mul(index, ir.Constant(_I64, _LANES * 4))
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
        phi.add_incoming(ir.Constant(_LANE_VECTOR, [0.0] * _LANES), entry)
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

        _emit_switch(builder, args[1], DOT_ROWS, emit)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 8), codegen
