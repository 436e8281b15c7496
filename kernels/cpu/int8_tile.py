# ruff: noqa: ANN401  # Numba and llvmlite have no types
"""Products of int8 weights with int16 activations, emitted as LLVM IR.

Both are whole numbers times a scale, which groups of 32 inputs share. Within a group everything is
exact: a processor multiplies pairs of int16 and adds them as int32 in one instruction, twice the
products of a float32 instruction, and LLVM joins it with the addition where there are VNNI
instructions. int16 keeps activations finer than the rounding of bfloat16, so what a result
lacks is what the weights have lost.

A stored group of a panel is [16 steps][PANEL outputs][2 inputs] int8 and the scales of the
outputs, bfloat16; one of a row of activations is 32 int16 and a scale, float32.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.kernels.cpu.intrinsics import (
    Typed,
    bf16_to_f32,
    declared,
    emit_load,
    emit_prefetch,
    pointer,
)
from octavo.kernels.cpu.processor import HAS_AVX512, LANES, PANEL

GROUP = 32
WEIGHT_GROUP_BYTES = GROUP * PANEL + 2 * PANEL
ROW_GROUP_BYTES = 2 * GROUP + 4

_STEPS = GROUP // 2
_UNROLLED = 4  # steps
_HALVES = PANEL // LANES  # vectors of a row of a tile
_LARGEST = 32767.0
# Below it the quotient of 32767 could be infinite; such a group counts as zero.
_SMALLEST = 1e-30
# Lines of a group, so that each is asked for wherever the group begins.
_FETCHES = WEIGHT_GROUP_BYTES // 64 + 1

_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_FLOAT = ir.FloatType()
_BYTES = ir.VectorType(_I8, 2 * LANES)
_SHORTS = ir.VectorType(_I16, 2 * LANES)
_SUMS = ir.VectorType(_I32, LANES)
_FLOATS = ir.VectorType(_FLOAT, LANES)


def _whole(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _broadcast(builder: Any, address: Any, element: ir.Type, vector: ir.VectorType) -> Any:
    scalar = emit_load(builder, address, element, 4)
    undefined = ir.Constant(vector, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(_SUMS, [0] * LANES))


def _sums_of_group(builder: Any, weights: Any, rows: list[Any]) -> list[Any]:
    """The int32 sums of a group for each row and half of the panel, by a loop over its steps."""
    name = "llvm.x86.avx512.pmaddw.d.512" if HAS_AVX512 else "llvm.x86.avx2.pmadd.wd"
    multiply = declared(builder, name, _SUMS, [_SHORTS, _SHORTS])
    before = builder.block
    loop = builder.append_basic_block("group.loop")
    after = builder.append_basic_block("group.after")
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(_I64)
    step.add_incoming(_whole(0), before)
    sums = [builder.phi(_SUMS) for _ in range(len(rows) * _HALVES)]
    new = list(sums)
    for number in range(_UNROLLED):
        here = builder.add(step, _whole(number))
        at = builder.add(weights, builder.mul(here, _whole(2 * PANEL)))
        halves = [
            builder.sext(
                emit_load(builder, builder.add(at, _whole(2 * LANES * half)), _BYTES, 1), _SHORTS
            )
            for half in range(_HALVES)
        ]
        for r, row in enumerate(rows):
            pair = builder.add(row, builder.mul(here, _whole(4)))
            inputs = builder.bitcast(_broadcast(builder, pair, _I32, _SUMS), _SHORTS)
            for half in range(_HALVES):
                place = r * _HALVES + half
                product = builder.call(multiply, [halves[half], inputs])
                new[place] = builder.add(new[place], product)
    following = builder.add(step, _whole(_UNROLLED))
    step.add_incoming(following, loop)
    for phi, value in zip(sums, new, strict=True):
        phi.add_incoming(ir.Constant(_SUMS, [0] * LANES), before)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, _whole(_STEPS)), loop, after)
    builder.position_at_end(after)
    return new


def emit_int8_tile(builder: Any, rows: int, args: Any) -> None:
    """See `tile.gemm_tile`; `steps` counts groups.

    Totals live in C, added up group by group in order: beside the sums of a group they would not
    fit the registers.
    """
    a, a_stride, w, w_stride, groups, fetch, fetch_stride, c, c_stride = args
    fma = declared(builder, f"llvm.fma.v{LANES}f32", _FLOATS, [_FLOATS] * 3)
    c_rows = [builder.add(c, builder.mul(c_stride, _whole(r))) for r in range(rows)]
    a_rows = [builder.add(a, builder.mul(a_stride, _whole(r))) for r in range(rows)]
    totals = [
        pointer(builder, builder.add(row, _whole(4 * LANES * half)), _FLOATS)
        for row in c_rows
        for half in range(_HALVES)
    ]
    for total in totals:
        builder.store(ir.Constant(_FLOATS, [0.0] * LANES), total).align = 4

    entry = builder.block
    loop = builder.append_basic_block("tile.loop")
    done = builder.append_basic_block("tile.done")
    builder.cbranch(builder.icmp_signed(">", groups, _whole(0)), loop, done)

    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(_whole(0), entry)
    weights = builder.add(w, builder.mul(index, w_stride))
    fetched = builder.add(fetch, builder.mul(index, fetch_stride))
    for line in range(_FETCHES):
        part = builder.sdiv(builder.mul(fetch_stride, _whole(line)), _whole(_FETCHES))
        emit_prefetch(builder, builder.add(fetched, part))
    begin = builder.mul(index, _whole(ROW_GROUP_BYTES))
    inputs = [builder.add(row, begin) for row in a_rows]
    sums = _sums_of_group(builder, weights, inputs)
    scales = [
        bf16_to_f32(
            builder,
            emit_load(
                builder,
                builder.add(weights, _whole(GROUP * PANEL + 2 * LANES * half)),
                ir.VectorType(_I16, LANES),
                2,
            ),
            _SUMS,
            _FLOATS,
        )
        for half in range(_HALVES)
    ]
    for r, row in enumerate(inputs):
        row_scale = _broadcast(builder, builder.add(row, _whole(2 * GROUP)), _FLOAT, _FLOATS)
        for half in range(_HALVES):
            place = r * _HALVES + half
            # The kernel's own flags would let LLVM multiply in another order for other rows.
            scale = builder.fmul(scales[half], row_scale, flags=("nsz",))
            before = builder.load(totals[place])
            before.align = 4
            exact = builder.sitofp(sums[place], _FLOATS)
            builder.store(builder.call(fma, [exact, scale, before]), totals[place]).align = 4
    following = builder.add(index, _whole(1))
    index.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, groups), loop, done)
    builder.position_at_end(done)


@intrinsic
def quantize_group(typingctx: Any, source: Any, target: Any) -> Typed:
    """Store 32 float32 from `source` as a group of a row at `target`.

    The scale is that of the largest magnitude, which becomes 32767; others are rounded to
    nearest. Where a number is not finite the scale is NaN and the rest is zero.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_quantized(builder, *args)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _emit_quantized(builder: Any, source: Any, target: Any) -> None:
    floats, words = ir.VectorType(_FLOAT, GROUP), ir.VectorType(_I32, GROUP)
    shorts = ir.VectorType(_I16, GROUP)
    largest_of = declared(builder, f"llvm.vector.reduce.umax.v{GROUP}i32", _I32, [words])
    round_of = declared(builder, f"llvm.rint.v{GROUP}f32", floats, [floats])
    values = emit_load(builder, source, floats, 4)
    # As whole numbers, since NaN then is the largest.
    mask = ir.Constant(words, [0x7FFFFFFF] * GROUP)
    bits = builder.call(largest_of, [builder.and_(builder.bitcast(values, words), mask)])
    finite = builder.icmp_unsigned("<", bits, ir.Constant(_I32, 0x7F800000))
    largest = builder.bitcast(bits, _FLOAT)
    used = builder.and_(finite, builder.fcmp_ordered(">", largest, ir.Constant(_FLOAT, _SMALLEST)))

    undefined = ir.Constant(floats, ir.Undefined)
    inverse = builder.fdiv(ir.Constant(_FLOAT, _LARGEST), largest, flags=("nsz",))
    single = builder.insert_element(undefined, inverse, ir.Constant(_I32, 0))
    factor = builder.shuffle_vector(single, undefined, ir.Constant(words, [0] * GROUP))
    rounded = builder.call(round_of, [builder.fmul(values, factor, flags=("nsz",))])
    zeros = ir.Constant(words, [0] * GROUP)
    # Chosen as bits, before they are whole numbers: there is none for NaN.
    safe = builder.select(used, builder.bitcast(rounded, words), zeros)
    whole = builder.fptosi(builder.bitcast(safe, floats), words)
    builder.store(builder.trunc(whole, shorts), pointer(builder, target, shorts)).align = 2

    step = builder.fdiv(largest, ir.Constant(_FLOAT, _LARGEST), flags=("nsz",))
    step = builder.select(used, step, ir.Constant(_FLOAT, 0.0))
    step = builder.select(finite, step, ir.Constant(_FLOAT, float("nan")))
    place = builder.add(target, _whole(2 * GROUP))
    builder.store(step, pointer(builder, place, _FLOAT)).align = 4
