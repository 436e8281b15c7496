# ruff: noqa: ANN401, PLR0913  # Numba and llvmlite have no types; kernels take addresses and sizes
"""The softmax of a row of scores, emitted as LLVM IR in whole vectors.

Powers are those of two: the scale of the scores has the factor log2(e). What a query does not see
has the weight 0. Sums are formed in one order, whatever follows after
the last key seen, so that a query's result does not depend on what else is in the step. Compiled
from loops, rows whose length fills no vectors would take several times as long.
"""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.kernels.cpu.intrinsics import Typed, bf16_to_f32, declared, emit_load, pointer
from octavo.kernels.cpu.processor import LANES
from octavo.kernels.cpu.tile import BFloat

# In place of minus infinity, whose difference to itself is not a number.
_UNSEEN = -1e30
# The largest score before any was seen: far above what is not seen, which then weighs nothing.
NONE_SEEN = -1e29
_LEAST = -127.0

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_WORDS = ir.VectorType(_I32, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)


def _all(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [float(value)] * LANES)


def _spread(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(_WORDS, [0] * LANES))


def _emit_power_of_two(builder: Any, x: Any, degree: int) -> Any:
    """2 to the power of x <= 0; 0 below -127. By Taylor's series about the nearest whole number.

    The relative error is 4e-5 for degree 4, 1e-7 for degree 6.
    """
    rint = declared(builder, f"llvm.rint.v{LANES}f32", _VECTOR, [_VECTOR])
    fma = declared(builder, f"llvm.fma.v{LANES}f32", _VECTOR, [_VECTOR] * 3)
    # NaN stays.
    x = builder.select(builder.fcmp_ordered("<", x, _all(_LEAST)), _all(_LEAST), x)
    whole = builder.call(rint, [x])
    rest = builder.fsub(x, whole)
    series, *others = (_all(math.log(2) ** n / math.factorial(n)) for n in range(degree, -1, -1))
    for coefficient in others:
        series = builder.call(fma, [series, rest, coefficient])
    # An exponent of 0 is that of the number 0.
    biased = builder.add(builder.fptosi(whole, _WORDS), ir.Constant(_WORDS, [127] * LANES))
    power = builder.bitcast(builder.shl(biased, ir.Constant(_WORDS, [23] * LANES)), _VECTOR)
    return builder.fmul(series, power)


def _loop(builder: Any, count: Any, start: Any, body: Callable[[Any, Any], Any]) -> Any:
    """`body(i, value)` for i = 0, LANES, ... below `count`, at least once: the last value."""
    before = builder.block
    loop = builder.append_basic_block("softmax.loop")
    after = builder.append_basic_block("softmax.after")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, value = builder.phi(_I64), builder.phi(start.type)
    new = body(index, value)
    following = builder.add(index, ir.Constant(_I64, LANES))
    for phi, first, last in ((index, ir.Constant(_I64, 0), following), (value, start, new)):
        phi.add_incoming(first, before)
        phi.add_incoming(last, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return new


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, pointer(builder, address, value.type)).align = 2


def _emit_rounded(builder: Any, weights: Any) -> tuple[Any, Any]:
    """Weights in bfloat16, as bits, and what they are then."""
    halves = ir.VectorType(BFloat(), LANES)
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    narrowed = builder.call(declared(builder, name, halves, [_VECTOR]), [weights])
    bits = builder.bitcast(narrowed, _SHORTS)
    return bits, bf16_to_f32(builder, bits, _WORDS, _VECTOR)


def _emit_softmax(builder: Any, rounded: bool, args: Any) -> tuple[Any, Any]:
    row, first, end, count, scale, before, weights = args
    larger = declared(builder, f"llvm.maxnum.v{LANES}f32", _VECTOR, [_VECTOR] * 2)
    of_two = declared(builder, "llvm.maxnum.f32", _F32, [_F32] * 2)
    across = declared(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", _F32, [_VECTOR])
    total_of = declared(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", _F32, [_F32, _VECTOR])
    lanes = ir.Constant(_WORDS, list(range(LANES)))
    bounds = [_spread(builder, builder.trunc(bound, _I32), _WORDS) for bound in (first, end)]
    factors = _spread(builder, scale, _VECTOR)

    def place(base: Any, index: Any, size: int) -> Any:
        return builder.add(base, builder.mul(index, ir.Constant(_I64, size)))

    def seen(index: Any) -> Any:
        here = builder.add(_spread(builder, builder.trunc(index, _I32), _WORDS), lanes)
        return builder.and_(
            builder.icmp_signed(">=", here, bounds[0]), builder.icmp_signed("<", here, bounds[1])
        )

    def scaled(index: Any, largest: Any) -> Any:
        at = place(row, index, 4)
        scores = builder.fmul(emit_load(builder, at, _VECTOR, 4), factors)
        scores = builder.select(seen(index), scores, _all(_UNSEEN))
        _store(builder, scores, at)
        return builder.call(larger, [largest, scores])

    highest = _loop(builder, count, _all(_UNSEEN), scaled)
    highest = builder.call(across, [highest], fastmath=("nnan", "nsz"))
    largest = builder.call(of_two, [before, highest])
    subtracted = _spread(builder, largest, _VECTOR)

    def weighed(index: Any, total: Any) -> Any:
        at = place(row, index, 4)
        scores = emit_load(builder, at, _VECTOR, 4)
        difference = builder.fsub(scores, subtracted)
        weight = _emit_power_of_two(builder, difference, 4 if rounded else 6)
        if rounded:
            bits, weight = _emit_rounded(builder, weight)
            _store(builder, bits, place(weights, index, 2))
        else:
            _store(builder, weight, place(weights, index, 4))
        # The kernel's own flags would let LLVM choose another order for another length.
        return builder.fadd(total, weight, flags=("nsz",))

    totals = _loop(builder, count, _all(0.0), weighed)
    zero = ir.Constant(_F32, 0.0)
    return largest, builder.call(total_of, [zero, totals], fastmath=("reassoc", "nsz"))


def _softmax(rounded: bool, document: str) -> Any:
    @intrinsic
    def softmax(
        typingctx: Any,
        row: Any,
        first: Any,
        end: Any,
        count: Any,
        scale: Any,
        before: Any,
        weights: Any,
    ) -> Typed:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            results = _emit_softmax(builder, rounded, args)
            return context.make_tuple(builder, signature.return_type, results)

        whole, number = types.int64, types.float32
        result = types.UniTuple(number, 2)
        return result(whole, whole, whole, whole, number, number, whole), codegen

    softmax.__doc__ = document
    return softmax


softmax_row = _softmax(
    False,
    """(largest, total) of float32 scores row[first:end] times `scale`; `before` is the least.

    `weights` gets 2^(score - largest) for columns 0 ... `count`, 0 outside of first ... end; it may
    be `row`, which is overwritten. `before` is at least `NONE_SEEN`. `count` > 0 is taken up to the
    next multiple of `LANES`.
    """,
)
softmax_row_bf16 = _softmax(
    True, "As `softmax_row`, with weights, of which `total` is the sum, in bfloat16."
)
