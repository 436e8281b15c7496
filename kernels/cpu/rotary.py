# ruff: noqa: ANN401  # Numba has no types
"""Rotary position embedding over NeoX halves."""

from typing import Any

import numpy as np
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu.compiled import Kernel, inlined
from octavo.kernels.cpu.intrinsics import keep_alive, load_f32, load_i64, store_f32
from octavo.kernels.cpu.numbers import CODES, F32, narrow_row, token_rows, widen_row
from octavo.kernels.cpu.pool import report, shared_pool

CHUNK_ELEMENTS = 4096


def rotary_embedding(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.ops.rotary_embedding`."""
    if k.dtype != q.dtype:
        return reference.rotary_embedding(q, k, positions, cos_sin)
    q, k, positions = token_rows(q), token_rows(k), positions.contiguous()
    tokens, q_heads, size = q.shape
    kv_heads = k.shape[1]
    out_q, out_k = q.new_empty(q.shape), k.new_empty(k.shape)
    per_chunk = max(1, CHUNK_ELEMENTS // ((q_heads + kv_heads) * size))
    wrong = shared_pool().run(
        _rotary,
        -(-tokens // per_chunk),
        q.data_ptr(),
        q.stride(0) * q.itemsize,
        k.data_ptr(),
        k.stride(0) * k.itemsize,
        out_q.data_ptr(),
        out_k.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[0],
        cos_sin.shape[1],
        q_heads,
        kv_heads,
        size,
        CODES[q.dtype],
        tokens,
        per_chunk,
    )
    if wrong:
        raise IndexError(f"rotary_embedding: a position is outside 0 ... {cos_sin.shape[0] - 1}")
    return out_q, out_k


@inlined
def rotate_row(row: int, table: int, half: int) -> None:
    """Rotate the first 2 * half components of float32 `row` by cosines and sines of `table`."""
    for i in range(half):
        first, second = load_f32(row, i), load_f32(row, half + i)
        cosine, sine = load_f32(table, i), load_f32(table, half + i)
        store_f32(row, i, first * cosine - second * sine)
        store_f32(row, half + i, second * cosine + first * sine)


@inlined
def _rotate(code: int, head: int, target: int, table: int, half: int, size: int, row: int) -> None:
    """One head, from `head` to `target`; `row` is scratch for it in float32."""
    widen_row(code, head, row, size)
    rotate_row(row, table, half)
    narrow_row(code, row, target, size)


def _rotary_kernel(a: Any, chunk: Any) -> None:
    rotary, q_heads, kv_heads = load_i64(a, 9), load_i64(a, 10), load_i64(a, 11)
    size, code, per_chunk = load_i64(a, 12), load_i64(a, 13), load_i64(a, 15)
    head_bytes = size * (4 if code == F32 else 2)
    memory = np.empty(size, np.float32)
    row = memory.ctypes.data
    for token in range(chunk * per_chunk, min((chunk + 1) * per_chunk, load_i64(a, 14))):
        position = load_i64(load_i64(a, 6), token)
        if position < 0 or position >= load_i64(a, 8):
            report(a, 1)
            continue
        table = load_i64(a, 7) + position * rotary * 4
        source = load_i64(a, 0) + token * load_i64(a, 1)
        target = load_i64(a, 4) + token * q_heads * head_bytes
        for head in range(q_heads):
            offset = head * head_bytes
            _rotate(code, source + offset, target + offset, table, rotary // 2, size, row)
        source = load_i64(a, 2) + token * load_i64(a, 3)
        target = load_i64(a, 5) + token * kv_heads * head_bytes
        for head in range(kv_heads):
            offset = head * head_bytes
            _rotate(code, source + offset, target + offset, table, rotary // 2, size, row)
    keep_alive(memory)


_rotary = Kernel(_rotary_kernel)
