# ruff: noqa: ANN401  # Numba has no types
"""Gated activations; the activated gate is rounded before it is multiplied."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from octavo.kernels.cpu.compiled import Kernel, inlined
from octavo.kernels.cpu.intrinsics import keep_alive, load_f32, load_i64, store_f32
from octavo.kernels.cpu.math import erf, exp, tanh
from octavo.kernels.cpu.numbers import CODES, F32, narrow_row, round_row, widen_row
from octavo.kernels.cpu.pool import shared_pool

_CHUNK_ELEMENTS = 8192
_ONE, _HALF = np.float32(1), np.float32(0.5)
_SQRT_HALF = np.float32(0.5**0.5)
_GELU_INNER, _GELU_CUBIC = np.float32((2 / np.pi) ** 0.5), np.float32(0.044715)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `octavo.kernels.ops.silu_and_mul`."""
    return _gated(_silu, gate_up)


def gelu_and_mul(gate_up: Tensor, tanh: bool) -> Tensor:
    """See `octavo.kernels.ops.gelu_and_mul`."""
    return _gated(_gelu_tanh if tanh else _gelu, gate_up)


def _gated(kernel: Kernel, gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    rows, doubled = gate_up.shape
    out = gate_up.new_empty((rows, doubled // 2))
    per_chunk = max(1, _CHUNK_ELEMENTS // doubled)
    shared_pool().run(
        kernel,
        -(-rows // per_chunk),
        gate_up.data_ptr(),
        out.data_ptr(),
        CODES[gate_up.dtype],
        rows,
        doubled // 2,
        per_chunk,
    )
    return out


SILU, GELU, GELU_TANH = range(3)


@inlined
def activate(kind: int, value: np.float32) -> np.float32:
    """silu, gelu or its approximation by tanh."""
    if kind == SILU:
        return np.float32(value / (_ONE + exp(-value)))
    if kind == GELU:
        return np.float32(_HALF * value * (_ONE + erf(value * _SQRT_HALF)))
    inner = _GELU_INNER * (value + _GELU_CUBIC * value * value * value)
    return np.float32(_HALF * value * (_ONE + tanh(inner)))


def _gated_kernel(kind: int) -> Callable[[Any, Any], None]:
    """The kernel for the activation `kind`."""

    def gated(a: Any, chunk: Any) -> None:
        source, target, code = load_i64(a, 0), load_i64(a, 1), load_i64(a, 2)
        columns, per_chunk = load_i64(a, 4), load_i64(a, 5)
        row_bytes = columns * (4 if code == F32 else 2)
        memory = np.empty(2 * columns, np.float32)
        gate = memory.ctypes.data
        up = gate + 4 * columns
        for row in range(chunk * per_chunk, min((chunk + 1) * per_chunk, load_i64(a, 3))):
            widen_row(code, source + 2 * row * row_bytes, gate, columns)
            widen_row(code, source + (2 * row + 1) * row_bytes, up, columns)
            for i in range(columns):
                store_f32(gate, i, activate(kind, load_f32(gate, i)))
            round_row(code, gate, columns)
            for i in range(columns):
                store_f32(gate, i, load_f32(gate, i) * load_f32(up, i))
            narrow_row(code, gate, target + row * row_bytes, columns)
        keep_alive(memory)

    return gated


_silu = Kernel(_gated_kernel(SILU))
_gelu = Kernel(_gated_kernel(GELU))
_gelu_tanh = Kernel(_gated_kernel(GELU_TANH))
