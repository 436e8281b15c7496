# ruff: noqa: ANN401  # Numba has no types
"""Root mean square norm, alone and with the addition of the residual before it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu.compiled import Kernel, inlined
from octavo.kernels.cpu.fetch import fetch
from octavo.kernels.cpu.intrinsics import (
    bits_to_f32,
    keep_alive,
    load_f32,
    load_i64,
    sqrt_f32,
    store_f32,
)
from octavo.kernels.cpu.numbers import (
    CODES,
    F32,
    float_bits,
    narrow_row,
    round_row,
    store_row,
    widen_row,
)
from octavo.kernels.cpu.pool import shared_pool

CHUNK_ELEMENTS = 2048


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo.kernels.ops.rms_norm`."""
    if weight.dtype != x.dtype:
        return reference.rms_norm(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    _normalize(x, None, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.ops.add_rms_norm`."""
    if not x.dtype == residual.dtype == weight.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _normalize(x, (residual, total), weight, eps, out)
    return out, total


def _normalize(
    x: Tensor, residual: tuple[Tensor, Tensor] | None, weight: Tensor, eps: float, out: Tensor
) -> None:
    columns = weight.shape[0]
    rows = x.numel() // columns
    per_chunk = max(1, CHUNK_ELEMENTS // columns)
    row_bytes = columns * x.itemsize
    addresses = (0, 0) if residual is None else (residual[0].data_ptr(), residual[1].data_ptr())
    shared_pool().run(
        norm_kernel,
        -(-rows // per_chunk),
        x.data_ptr(),
        *addresses,
        weight.data_ptr(),
        out.data_ptr(),
        CODES[x.dtype],
        rows,
        columns,
        per_chunk,
        float_bits(eps),
        0,
        row_bytes,
    )


@inlined
def normalize_row(code: int, row: int, weight: int, columns: int, eps: np.float32) -> None:
    """row[:columns] normed in place, all in float32; the last product is not rounded yet."""
    squares = np.float32(0)
    for i in range(columns):
        value = load_f32(row, i)
        squares += value * value
    inverse = np.float32(1) / sqrt_f32(squares / np.float32(columns) + eps)
    for i in range(columns):
        store_f32(row, i, load_f32(row, i) * inverse)
    round_row(code, row, columns)
    for i in range(columns):
        store_f32(row, i, load_f32(row, i) * load_f32(weight, i))


def _rms_norm_kernel(a: Any, chunk: Any) -> None:
    residual, code, columns = load_i64(a, 1), load_i64(a, 5), load_i64(a, 7)
    per_chunk, eps = load_i64(a, 8), bits_to_f32(load_i64(a, 9))
    row_bytes = columns * (4 if code == F32 else 2)
    memory = np.empty(3 * columns, np.float32)
    row = memory.ctypes.data
    other = row + 4 * columns
    weight = other + 4 * columns
    widen_row(code, load_i64(a, 3), weight, columns)
    end = min((chunk + 1) * per_chunk, load_i64(a, 6))
    for number in range(chunk * per_chunk, end):
        offset = number * row_bytes
        if number + 1 < end:
            fetch(load_i64(a, 0) + offset + row_bytes, row_bytes)
            if residual != 0:
                fetch(residual + offset + row_bytes, row_bytes)
        widen_row(code, load_i64(a, 0) + offset, row, columns)
        if residual != 0:
            widen_row(code, residual + offset, other, columns)
            for i in range(columns):
                store_f32(row, i, load_f32(row, i) + load_f32(other, i))
            round_row(code, row, columns)
            narrow_row(code, row, load_i64(a, 2) + offset, columns)
        normalize_row(code, row, weight, columns, eps)
        target = load_i64(a, 4) + number * load_i64(a, 11)
        store_row(code, load_i64(a, 10), row, target, columns)
    keep_alive(memory)


norm_kernel = Kernel(_rms_norm_kernel)
