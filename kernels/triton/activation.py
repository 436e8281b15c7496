"""Gated activations, rounded between the two factors as transformers does."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.host import FLOATS, ceil_div, check, check_rows_dense

_TILE = 1024


@triton.jit
def _gated_kernel(
    gate_up_ptr,
    out_ptr,
    row_stride: tl.int64,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    kept = columns < SIZE
    gate_ptr = gate_up_ptr + row * row_stride
    gate = tl.load(gate_ptr + columns, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE + columns, mask=kept, other=0.0).to(tl.float32)
    if KIND == "silu":
        active = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # (1 + tanh(y)) / 2 = sigmoid(2 y), with y = sqrt(2 / pi) * (gate + 0.044715 gate^3)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    active = active.to(gate_up_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, (active * up).to(out_ptr.dtype.element_ty), mask=kept)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `octavo.kernels.ops.silu_and_mul`."""
    return _gated(gate_up, "silu")


def gelu_and_mul(gate_up: Tensor, tanh: bool) -> Tensor:
    """See `octavo.kernels.ops.gelu_and_mul`."""
    return _gated(gate_up, "gelu_tanh" if tanh else "gelu")


def _gated(gate_up: Tensor, kind: str) -> Tensor:
    check(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, "gate and up are {}", gate_up.shape)
    check(gate_up.dtype in FLOATS, "activation of {}", gate_up.dtype)
    check_rows_dense("gate_up", gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _gated_kernel[(rows, ceil_div(size, _TILE))](
        gate_up, out, gate_up.stride(0), SIZE=size, TILE=_TILE, KIND=kind, num_warps=4
    )
    return out
