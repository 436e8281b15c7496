# ruff: noqa: ANN401  # llvmlite has no types
"""Pieces of LLVM IR that several kernels are put together from."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from octavo.kernels.cpu.intrinsics import pointer

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


def whole(value: int) -> ir.Constant:
    """An int64."""
    return ir.Constant(_I64, value)


def emit_spread(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    """`scalar` in all lanes."""
    undefined = ir.Constant(vector, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(single, undefined, lanes)


def emit_store(builder: Any, value: Any, address: Any) -> None:
    """Store `value` at an address that is a multiple of 2."""
    builder.store(value, pointer(builder, address, value.type)).align = 2


def emit_loop(
    builder: Any,
    end: Any,
    step: int,
    start: Sequence[Any],
    body: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """`body(i, values)` for i = 0, step, ... below `end`, at least once: the last values."""
    before = builder.block
    loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, values = builder.phi(_I64), [builder.phi(value.type) for value in start]
    new = list(body(index, list(values)))
    following = builder.add(index, whole(step))
    phis, firsts, lasts = [index, *values], [whole(0), *start], [following, *new]
    for phi, first, last in zip(phis, firsts, lasts, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, after)
    builder.position_at_end(after)
    return new
