# ruff: noqa: ANN401  # Numba has no types
"""From the product of the projections to queries and cache rows, in one pass over the heads."""

from typing import Any

import numpy as np

from octavo.kernels.cpu.compiled import Kernel, inlined
from octavo.kernels.cpu.fetch import fetch
from octavo.kernels.cpu.intrinsics import bits_to_f32, copy_bytes, keep_alive, load_i64
from octavo.kernels.cpu.norm import normalize_row
from octavo.kernels.cpu.numbers import F32, narrow_row, round_row, widen_row
from octavo.kernels.cpu.pool import report
from octavo.kernels.cpu.rotary import rotate_row

# The kernel's arguments, in this order. Rows of `qkv` hold query, key and value heads.
(
    _QKV,
    _Q,
    _KEYS,
    _VALUES,
    _POSITIONS,
    _COS_SIN,
    _TABLE_ROWS,
    _ROTARY,
    _Q_HEADS,
    _KV_HEADS,
    _SIZE,
    _CODE,
    _TOKENS,
    _PER_CHUNK,
    _SLOTS,
    _BLOCK_SIZE,
    _NUM_SLOTS,
    _Q_NORM,
    _K_NORM,
    _EPS,
) = range(20)


@inlined
def _prepare(a: int, source: int, target: int, row: int, norm: int, table: int) -> None:
    """One head, normed if `norm` is the address of weights, and rotated."""
    size, code = load_i64(a, _SIZE), load_i64(a, _CODE)
    widen_row(code, source, row, size)
    if norm != 0:
        normalize_row(code, row, norm, size, bits_to_f32(load_i64(a, _EPS)))
        round_row(code, row, size)
    rotate_row(row, table, load_i64(a, _ROTARY) // 2)
    narrow_row(code, row, target, size)


@inlined
def _cached_row(a: int, slot: int, head: int) -> int:
    """Row of a KV head in the cache seen as [blocks * Hkv * block_size, D]."""
    kv_heads, block_size = load_i64(a, _KV_HEADS), load_i64(a, _BLOCK_SIZE)
    row: int = (slot // block_size * kv_heads + head) * block_size + slot % block_size
    return row


@inlined
def _fetch_token(a: int, token: int, head_bytes: int) -> None:
    """Have what a token reads and writes brought near."""
    kv_heads = load_i64(a, _KV_HEADS)
    token_bytes = (load_i64(a, _Q_HEADS) + 2 * kv_heads) * head_bytes
    fetch(load_i64(a, _QKV) + token * token_bytes, token_bytes)
    slot = load_i64(load_i64(a, _SLOTS), token)
    for head in range(kv_heads):
        offset = _cached_row(a, slot, head) * head_bytes
        fetch(load_i64(a, _KEYS) + offset, head_bytes)
        fetch(load_i64(a, _VALUES) + offset, head_bytes)


def _heads_kernel(a: Any, chunk: Any) -> None:
    q_heads, kv_heads, size = load_i64(a, _Q_HEADS), load_i64(a, _KV_HEADS), load_i64(a, _SIZE)
    code, per_chunk = load_i64(a, _CODE), load_i64(a, _PER_CHUNK)
    head_bytes = size * (4 if code == F32 else 2)
    memory = np.empty(3 * size, np.float32)
    row = memory.ctypes.data
    q_norm, k_norm = row + 4 * size, row + 8 * size
    normed = load_i64(a, _Q_NORM) != 0
    if normed:
        widen_row(code, load_i64(a, _Q_NORM), q_norm, size)
        widen_row(code, load_i64(a, _K_NORM), k_norm, size)
    else:
        q_norm, k_norm = 0, 0
    end = min((chunk + 1) * per_chunk, load_i64(a, _TOKENS))
    for token in range(chunk * per_chunk, end):
        if token + 1 < end:
            _fetch_token(a, token + 1, head_bytes)
        position, slot = (
            load_i64(load_i64(a, _POSITIONS), token),
            load_i64(load_i64(a, _SLOTS), token),
        )
        if position < 0 or position >= load_i64(a, _TABLE_ROWS) or slot >= load_i64(a, _NUM_SLOTS):
            report(a, 1)
            continue
        table = load_i64(a, _COS_SIN) + position * load_i64(a, _ROTARY) * 4
        source = load_i64(a, _QKV) + token * (q_heads + 2 * kv_heads) * head_bytes
        target = load_i64(a, _Q) + token * q_heads * head_bytes
        for head in range(q_heads):
            offset = head * head_bytes
            _prepare(a, source + offset, target + offset, row, q_norm, table)
        if slot < 0:
            continue
        source += q_heads * head_bytes
        for head in range(kv_heads):
            cached = _cached_row(a, slot, head)
            offset = head * head_bytes
            key, value = load_i64(a, _KEYS), load_i64(a, _VALUES)
            _prepare(a, source + offset, key + cached * head_bytes, row, k_norm, table)
            offset += kv_heads * head_bytes
            copy_bytes(value + cached * head_bytes, source + offset, head_bytes)
    keep_alive(memory)


heads_kernel = Kernel(_heads_kernel)
