# ruff: noqa: ANN401  # Numba and llvmlite have no types
"""Raw memory, bit casts and atomics for the CPU kernels.

Kernels take plain integer addresses: reading a tensor through a Numba array would cost
several microseconds per argument, and its wrap-around index checks keep loops from being
vectorised. Nothing here checks bounds; the wrappers check shapes before a kernel runs.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_F64 = ir.DoubleType()
_HALF = ir.HalfType()

# Numba hands the typing context and the IR builder to each intrinsic; neither has stubs.
Typed = tuple[Any, Any]


def pointer(builder: Any, address: Any, element: ir.Type) -> Any:
    """`address` as a pointer to `element`."""
    return builder.inttoptr(address, element.as_pointer())


def emit_load(builder: Any, address: Any, kind: ir.Type, align: int) -> Any:
    """What lies at `address`, which is a multiple of `align`."""
    value = builder.load(pointer(builder, address, kind))
    value.align = align
    return value


def _element(builder: Any, address: Any, index: Any, element: ir.Type) -> Any:
    return builder.gep(pointer(builder, address, element), [index])


def declared(builder: Any, name: str, result: ir.Type, arguments: list[ir.Type]) -> Any:
    """The function `name` of this module, declared at first use."""
    known = builder.module.globals.get(name)
    if known is not None:
        return known
    return ir.Function(builder.module, ir.FunctionType(result, arguments), name)


NEAREST_CACHE, SECOND_CACHE = 3, 2


def emit_prefetch(builder: Any, address: Any, cache: int = NEAREST_CACHE) -> None:
    """Ask for the cache line at `address`, to be read soon; any address is allowed."""
    byte = ir.IntType(8).as_pointer()
    function = declared(builder, "llvm.prefetch.p0", ir.VoidType(), [byte, _I32, _I32, _I32])
    flags = [ir.Constant(_I32, value) for value in (0, cache, 1)]
    builder.call(function, [builder.inttoptr(address, byte), *flags])


def bf16_to_f32(builder: Any, bits: Any, width: ir.Type, target: ir.Type) -> Any:
    """Widen bfloat16 bits: they are the high half of the float32 of the same value."""
    shift = ir.Constant(width, 16 if width == _I32 else [16] * width.count)
    return builder.bitcast(builder.shl(builder.zext(bits, width), shift), target)


def f32_to_bf16(builder: Any, value: Any) -> Any:
    """Round a scalar float32 to bfloat16 bits, to nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
    rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
    # The integer test, because fast-math flags let LLVM drop a test for NaN.
    magnitude = builder.and_(bits, ir.Constant(_I32, 0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, ir.Constant(_I32, 0x7F800000))
    chosen = builder.select(is_nan, ir.Constant(_I32, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(chosen, ir.Constant(_I32, 16)), _I16)


def _loader(element: ir.Type, result: Any, convert: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any, index: Any) -> Typed:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return convert(builder, builder.load(_element(builder, args[0], args[1], element)))

        return result(types.int64, types.int64), codegen

    return load


def _storer(element: ir.Type, source: Any, convert: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, index: Any, value: Any) -> Typed:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = convert(builder, args[2])
            builder.store(value, _element(builder, args[0], args[1], element))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, source), codegen

    return store


def _mapping(argument: Any, result: Any, convert: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def convert_value(typingctx: Any, value: Any) -> Typed:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return convert(builder, args[0])

        return result(argument), codegen

    return convert_value


def _same(builder: Any, value: Any) -> Any:
    return value


def _bf16_widened(builder: Any, bits: Any) -> Any:
    return bf16_to_f32(builder, bits, _I32, _F32)


def _f16_widened(builder: Any, value: Any) -> Any:
    return builder.fpext(value, _F32)


def _f16_narrowed(builder: Any, value: Any) -> Any:
    return builder.fptrunc(value, _HALF)


def _power_of_two(builder: Any, value: Any) -> Any:
    biased = builder.add(builder.fptosi(value, _I32), ir.Constant(_I32, 127))
    return builder.bitcast(builder.shl(biased, ir.Constant(_I32, 23)), _F32)


def _unary(name: str) -> Callable[[Any, Any], Any]:
    def call(builder: Any, value: Any) -> Any:
        return builder.call(declared(builder, f"{name}.f32", _F32, [_F32]), [value])

    return call


# load(address, index): an element of the array at `address`, widened to float32 or int64.
load_f32 = _loader(_F32, types.float32, _same)
load_bf16 = _loader(_I16, types.float32, _bf16_widened)
load_f16 = _loader(_HALF, types.float32, _f16_widened)
load_f64 = _loader(_F64, types.float64, _same)
load_i32 = _loader(_I32, types.int64, lambda builder, value: builder.sext(value, _I64))
load_i64 = _loader(_I64, types.int64, _same)

# store(address, index, value): float32, float64 or int64, rounded once to the element type.
store_f32 = _storer(_F32, types.float32, _same)
store_f64 = _storer(_F64, types.float64, _same)
store_bf16 = _storer(_I16, types.float32, f32_to_bf16)
store_f16 = _storer(_HALF, types.float32, _f16_narrowed)
store_i64 = _storer(_I64, types.int64, _same)

# float32 rounded to the nearest value of a shorter type.
round_bf16 = _mapping(
    types.float32, types.float32, lambda b, value: _bf16_widened(b, f32_to_bf16(b, value))
)
round_f16 = _mapping(
    types.float32, types.float32, lambda b, value: _f16_widened(b, _f16_narrowed(b, value))
)

# The float32 whose bits are the low half of an int64.
bits_to_f32 = _mapping(
    types.int64, types.float32, lambda b, bits: b.bitcast(b.trunc(bits, _I32), _F32)
)

# 2 to the power of a whole float32 in -126 ... 127.
power_of_two = _mapping(types.float32, types.float32, _power_of_two)
floor_f32 = _mapping(types.float32, types.float32, _unary("llvm.floor"))
sqrt_f32 = _mapping(types.float32, types.float32, _unary("llvm.sqrt"))


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, count: Any) -> Typed:
    """Copy `count` bytes between two areas that do not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        flag = ir.IntType(1)
        name = "llvm.memcpy.p0.p0.i64"
        function = declared(builder, name, ir.VoidType(), [byte, byte, _I64, flag])
        target, source = builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte)
        builder.call(function, [target, source, args[2], ir.Constant(flag, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def keep_alive(typingctx: Any, array: Any) -> Typed:
    """Hold an array until here.

    Numba frees an array after the last line that names it, which does not see the uses of its
    address.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), codegen


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Typed:
    """int64 at `address`, acquire."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0], _I64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx: Any, address: Any, value: Any) -> Typed:
    """Store int64 at `address`, sequentially consistent."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], pointer(builder, args[0], _I64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Typed:
    """Add to the int64 at `address`; the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_exchange(typingctx: Any, address: Any, value: Any) -> Typed:
    """Put `value` into the int64 at `address`; the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", pointer(builder, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


def _semaphore_call(name: str, document: str, *constants: int) -> Any:
    """An intrinsic that calls a function of POSIX semaphores on the one at an address."""

    @intrinsic
    def call(typingctx: Any, address: Any) -> Typed:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte = ir.IntType(8).as_pointer()
            function = declared(builder, name, _I32, [byte, *[_I32] * len(constants)])
            values = [ir.Constant(_I32, value) for value in constants]
            builder.call(function, [builder.inttoptr(args[0], byte), *values])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    call.__doc__ = document
    return call


semaphore_init = _semaphore_call("sem_init", "Make a semaphore of this process, at 0.", 0, 0)
semaphore_post = _semaphore_call("sem_post", "Count up by one; wakes a thread that waits.")
semaphore_wait = _semaphore_call("sem_wait", "Sleep until the count is above 0; take one.")


@intrinsic
def call_kernel(typingctx: Any, function: Any, arguments: Any, chunk: Any) -> Typed:
    """Call the compiled kernel at address `function` with (arguments, chunk)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64, _I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1], args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Typed:
    """Ask for the cache line at `address`; any address is allowed.

    Into the second cache, which waits for more lines at once than the nearest.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0], SECOND_CACHE)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def largest_f32(typingctx: Any, address: Any, first: Any, end: Any, least: Any) -> Typed:
    """The largest of `least` and float32 first <= i < end at `address`; NaN may be missed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_largest(builder, *args)

    return types.float32(types.int64, types.int64, types.int64, types.float32), codegen


def _emit_largest(builder: Any, address: Any, first: Any, end: Any, least: Any) -> Any:
    """Whole vectors, then one by one."""
    lanes = 16
    vector = ir.VectorType(_F32, lanes)
    larger = declared(builder, f"llvm.maxnum.v{lanes}f32", vector, [vector] * 2)
    of_two = declared(builder, "llvm.maxnum.f32", _F32, [_F32] * 2)
    across = declared(builder, f"llvm.vector.reduce.fmax.v{lanes}f32", _F32, [vector])

    def loop(begin: Any, stop: Any, step: int, start: Any, combine: Callable[..., Any]) -> Any:
        before = builder.block
        body, after = (
            builder.append_basic_block("max.loop"),
            builder.append_basic_block("max.after"),
        )
        builder.cbranch(builder.icmp_signed("<", begin, stop), body, after)
        builder.position_at_end(body)
        index, value = builder.phi(_I64), builder.phi(start.type)
        index.add_incoming(begin, before)
        value.add_incoming(start, before)
        new = combine(index, value)
        following = builder.add(index, ir.Constant(_I64, step))
        index.add_incoming(following, body)
        value.add_incoming(new, body)
        builder.cbranch(builder.icmp_signed("<", following, stop), body, after)
        builder.position_at_end(after)
        result = builder.phi(start.type)
        result.add_incoming(start, before)
        result.add_incoming(new, body)
        return result

    def place(index: Any) -> Any:
        return builder.add(address, builder.mul(index, ir.Constant(_I64, 4)))

    whole = builder.and_(builder.sub(end, first), ir.Constant(_I64, -lanes))
    middle = builder.add(first, whole)
    nothing = ir.Constant(vector, [float("-inf")] * lanes)
    wide = loop(
        first,
        middle,
        lanes,
        nothing,
        lambda i, v: builder.call(larger, [v, emit_load(builder, place(i), vector, 4)]),
    )
    start = builder.call(of_two, [least, builder.call(across, [wide], fastmath=("nnan", "nsz"))])
    return loop(
        middle,
        end,
        1,
        start,
        lambda i, v: builder.call(of_two, [v, emit_load(builder, place(i), _F32, 4)]),
    )


@intrinsic
def read_clock(typingctx: Any) -> Typed:
    """The processor's time stamp counter: a constant rate of 2 to 4 counts in a nanosecond."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(declared(builder, "llvm.readcyclecounter", _I64, []), [])

    return types.int64(), codegen


@intrinsic
def spin_pause(typingctx: Any) -> Typed:
    """Tell the processor that this is a waiting loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(declared(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        return context.get_dummy_value()

    return types.void(), codegen
