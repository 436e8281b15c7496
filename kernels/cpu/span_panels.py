# ruff: noqa: ANN401  # Numba and llvmlite have no types
"""Rows of the KV cache turned into panels of pairs of bfloat16, emitted as LLVM IR.

`tile.gemm_tile` then multiplies them as it does weights. Rows are named by their offsets in bytes.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.kernels.cpu.emission import emit_loop, emit_store, whole
from octavo.kernels.cpu.intrinsics import Typed, emit_load

KEYS_AT_ONCE = 16

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_WORDS = ir.VectorType(_I32, KEYS_AT_ONCE)
_ROW = ir.VectorType(ir.IntType(16), 32)
_PANEL_ROW_BYTES = 128


def rows_at(builder: Any, base: Any, offsets: Any, count: int) -> list[Any]:
    """Addresses of rows, from `count` int64 offsets in bytes at address `offsets`."""
    return [
        builder.add(base, emit_load(builder, builder.add(offsets, whole(8 * i)), _I64, 8))
        for i in range(count)
    ]


def _shuffled(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)
    return builder.shuffle_vector(first, second, mask)


def emit_transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 words: in four rounds, bit by bit of a lane's number."""
    lanes = range(KEYS_AT_ONCE)
    for bit in (8, 4, 2, 1):
        low = [lane if not lane & bit else KEYS_AT_ONCE + lane - bit for lane in lanes]
        high = [lane + bit if not lane & bit else KEYS_AT_ONCE + lane for lane in lanes]
        following = list(rows)
        for i in lanes:
            if not i & bit:
                following[i] = _shuffled(builder, rows[i], rows[i + bit], low)
                following[i + bit] = _shuffled(builder, rows[i], rows[i + bit], high)
        rows = following
    return rows


def emit_pairs(builder: Any, first: Any, second: Any) -> list[Any]:
    """Two rows of 32 side by side: the pairs of the first 16 components, then of the others."""
    return [
        _shuffled(builder, first, second, [x for i in range(at, at + 16) for x in (i, 32 + i)])
        for at in (0, 16)
    ]


@intrinsic
def transpose_keys(typingctx: Any, base: Any, offsets: Any, words: Any, target: Any) -> Typed:
    """16 keys, rows of `words` pairs, as one half of a panel [words, 32 keys] of pairs.

    `offsets` is the address of 16 int64. Rows are read, and the panel is written, 16 words at a
    time.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base, offsets, words, target = args
        keys = rows_at(builder, base, offsets, KEYS_AT_ONCE)

        def transpose(first: Any, values: list[Any]) -> list[Any]:
            offset = builder.mul(first, whole(4))
            rows = [emit_load(builder, builder.add(key, offset), _WORDS, 2) for key in keys]
            for i, word in enumerate(emit_transposed(builder, rows)):
                line = builder.mul(builder.add(first, whole(i)), whole(_PANEL_ROW_BYTES))
                emit_store(builder, word, builder.add(target, line))
            return values

        emit_loop(builder, words, KEYS_AT_ONCE, [], transpose)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def pair_values(
    typingctx: Any, base: Any, offsets: Any, parts: Any, target: Any, part_bytes: Any
) -> Typed:
    """Two rows of values as a row of each panel: [parts][.., 32 components] of pairs.

    `offsets` is the address of two int64; a panel lies `part_bytes` after the one before.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base, offsets, parts, target, part_bytes = args
        rows = rows_at(builder, base, offsets, 2)

        def pair(part: Any, values: list[Any]) -> list[Any]:
            offset = builder.mul(part, whole(64))
            both = [emit_load(builder, builder.add(row, offset), _ROW, 2) for row in rows]
            place = builder.add(target, builder.mul(part, part_bytes))
            for half, pairs in enumerate(emit_pairs(builder, *both)):
                emit_store(builder, pairs, builder.add(place, whole(64 * half)))
            return values

        emit_loop(builder, parts, 1, [], pair)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen
