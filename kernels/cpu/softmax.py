# ruff: noqa: ANN401, PLR0913  # Numba and llvmlite have no types; kernels take addresses and sizes
"""The softmax of a row of scores, emitted as LLVM IR in whole vectors.

Powers are those of two: the scale of the scores has the factor log2(e). What a query does not see
has the weight 0. Sums are formed in one order, whatever follows after the last key seen, so that a
query's result does not depend on what else is in the step. Compiled from loops, rows whose length
fills no vectors would take several times as long.
"""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.kernels.cpu.emission import emit_loop, emit_spread, emit_store
from octavo.kernels.cpu.intrinsics import Typed, bf16_to_f32, declared, emit_load
from octavo.kernels.cpu.processor import LANES
from octavo.kernels.cpu.tile import BFloat

# In place of minus infinity, whose difference to itself is not a number.
_UNSEEN = -3e38
# The largest score before any was seen: far above what is not seen, which then weighs nothing.
NONE_SEEN = -1e38
_LEAST = -127.0

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_WORDS = ir.VectorType(_I32, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)


def _all(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [float(value)] * LANES)


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


def _emit_rounded(builder: Any, weights: Any) -> tuple[Any, Any]:
    """Weights in bfloat16, as bits, and what they are then."""
    halves = ir.VectorType(BFloat(), LANES)
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    narrowed = builder.call(declared(builder, name, halves, [_VECTOR]), [weights])
    bits = builder.bitcast(narrowed, _SHORTS)
    return bits, bf16_to_f32(builder, bits, _WORDS, _VECTOR)


def _emit_sum(builder: Any, vector: Any) -> Any:
    """The sum over the lanes: of one half and the other, again and again."""
    count = LANES
    while count > 1:
        count //= 2
        halves = [
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, count), lanes))
            for lanes in (list(range(count)), list(range(count, 2 * count)))
        ]
        vector = builder.fadd(*halves, flags=("nsz",))
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _emit_softmax(builder: Any, rounded: bool, args: Any) -> tuple[Any, Any]:
    row, first, end, count, scale, before, weights = args
    larger = declared(builder, f"llvm.maxnum.v{LANES}f32", _VECTOR, [_VECTOR] * 2)
    of_two = declared(builder, "llvm.maxnum.f32", _F32, [_F32] * 2)
    across = declared(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", _F32, [_VECTOR])
    lanes = ir.Constant(_WORDS, list(range(LANES)))
    bounds = [emit_spread(builder, builder.trunc(bound, _I32), _WORDS) for bound in (first, end)]
    factors = emit_spread(builder, scale, _VECTOR)

    def place(base: Any, index: Any, size: int) -> Any:
        return builder.add(base, builder.mul(index, ir.Constant(_I64, size)))

    def seen(index: Any) -> Any:
        here = builder.add(emit_spread(builder, builder.trunc(index, _I32), _WORDS), lanes)
        return builder.and_(
            builder.icmp_signed(">=", here, bounds[0]), builder.icmp_signed("<", here, bounds[1])
        )

    def scaled(index: Any, values: list[Any]) -> list[Any]:
        at = place(row, index, 4)
        scores = builder.fmul(emit_load(builder, at, _VECTOR, 4), factors)
        scores = builder.select(seen(index), scores, _all(_UNSEEN))
        emit_store(builder, scores, at)
        return [builder.call(larger, [*values, scores])]

    (highest,) = emit_loop(builder, count, LANES, [_all(_UNSEEN)], scaled)
    highest = builder.call(across, [highest], fastmath=("nnan", "nsz"))
    largest = builder.call(of_two, [before, highest])
    subtracted = emit_spread(builder, largest, _VECTOR)

    def weighed(index: Any, totals: list[Any]) -> list[Any]:
        at = place(row, index, 4)
        scores = emit_load(builder, at, _VECTOR, 4)
        difference = builder.fsub(scores, subtracted)
        weight = _emit_power_of_two(builder, difference, 4 if rounded else 6)
        if rounded:
            bits, weight = _emit_rounded(builder, weight)
            emit_store(builder, bits, place(weights, index, 2))
        else:
            emit_store(builder, weight, place(weights, index, 4))
        # The kernel's own flags would let LLVM choose another order for another length.
        return [builder.fadd(*totals, weight, flags=("nsz",))]

    (totals,) = emit_loop(builder, count, LANES, [_all(0.0)], weighed)
    return largest, _emit_sum(builder, totals)


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
    """(largest, total) of float32 scores row[first:end] times `scale`; largest is >= `before`.

    `weights` gets 2^(score - largest) for columns 0 ... `count`, 0 outside of first ... end; it may
    be `row`, which is overwritten. `before` is at least `NONE_SEEN`. `count` > 0 is taken up to the
    next multiple of `LANES`.
    """,
)
softmax_row_bf16 = _softmax(
    True, "As `softmax_row`, with weights, of which `total` is the sum, in bfloat16."
)
