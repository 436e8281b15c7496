"""Root mean square norm with Llama's rounding order, alone and after the residual addition.

The mean of squares and the quotient are fp32; the quotient is rounded to the dtype of x, then
multiplied by the weight. The sum x + residual is rounded once, before anything else reads it.
A program takes as many rows as fill a tile of _TILE_ELEMENTS.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.host import (
    FLOATS,
    ceil_div,
    check,
    check_rows_dense,
    check_same_device,
    power_of_2,
)

_TILE_ELEMENTS = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    num_rows,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    eps,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PAD)
    kept = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=kept, other=0.0)
    out_offsets = rows[:, None] * SIZE + columns[None, :]
    if residual_ptr is not None:
        residual_offsets = rows[:, None] * residual_stride + columns[None, :]
        residual = tl.load(residual_ptr + residual_offsets, mask=kept, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(sum_ptr + out_offsets, x, mask=kept)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    quotient = (wide * inverse[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    out = (quotient * weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets, out, mask=kept)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo.kernels.ops.rms_norm`."""
    return _normalize(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.ops.add_rms_norm`."""
    same = x.shape == residual.shape and x.dtype == residual.dtype
    check(same, "x {} {}, residual {} {}", x.shape, x.dtype, residual.shape, residual.dtype)
    return _normalize(x, residual, weight, eps)


def _normalize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm, sum); without a residual the sum is x itself."""
    size = x.shape[-1]
    check(x.dtype in FLOATS and weight.dtype == x.dtype, "norm of {} by {}", x.dtype, weight.dtype)
    check(weight.shape == (size,), "a weight {} for rows of {}", tuple(weight.shape), size)
    check_rows_dense("weight", weight)
    rows = x.reshape(-1, size)
    check_rows_dense("x", rows)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    other, total = rows, x
    if residual is not None:
        other = residual.reshape(-1, size)
        check_rows_dense("residual", other)
        total = torch.empty_like(out)
    check_same_device(rows, other, weight)
    pad = power_of_2(size)
    per_program = max(1, _TILE_ELEMENTS // pad)
    _rms_norm_kernel[(ceil_div(rows.shape[0], per_program),)](
        rows,
        None if residual is None else other,
        weight,
        out,
        None if residual is None else total,
        rows.shape[0],
        rows.stride(0),
        other.stride(0),
        eps,
        SIZE=size,
        PAD=pad,
        ROWS=per_program,
        num_warps=4 if pad <= 2048 else 8 if pad <= 8192 else 16,
    )
    return out, total
