"""Linear layers: a skinny kernel for the fewest rows, the vendor's library for all others.

With a few rows the time is that of reading the weight once. The kernel lets each program stream
_COLUMNS rows of the weight past all rows of x, padded to the smallest tensor-core tile.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.projection import PlainWeight, embedding, pack_linear
from octavo.kernels.triton.host import ceil_div, check, check_rows_dense, check_same_device

__all__ = [
    "embedding",
    "linear",
    "linear_in_slices",
    "pack_linear",
    "skinny_linear",
    "sum_in_fp32",
]

SKINNY_ROWS = 4
"""Most rows that `linear` gives to the kernel."""

SLICE_ROWS = 128
"""Rows of one product where results must not depend on the number of rows."""

_ROWS = 16
_COLUMNS = 16
_DEPTH = 256


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride: tl.int64,
    weight_stride: tl.int64,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Rows past the end read the last row again: no mask in the loop, and nothing is stored.
    x_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    x_place = x_ptr + x_rows[:, None] * x_stride + depth[None, :]
    weight_rows = tl.minimum(columns, N - 1)
    weight_place = weight_ptr + weight_rows[:, None] * weight_stride + depth[None, :]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K // DEPTH * DEPTH, DEPTH):
        x = tl.load(x_place + start)
        weight = tl.load(weight_place + start)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if K % DEPTH != 0:
        start = K // DEPTH * DEPTH
        kept = (start + depth < K)[None, :]
        x = tl.load(x_place + start, mask=kept, other=0.0)
        weight = tl.load(weight_place + start, mask=kept, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + weight_rows).to(tl.float32)[None, :]
    kept = (rows < num_rows)[:, None] & (columns < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=kept)


def sum_in_fp32() -> None:
    """Has torch's matrix products on a GPU keep sums, and factors of fp32, in fp32.

    By default parts of a sum may be rounded to 16 bits before they are added up, and images of
    NVIDIA round factors of fp32 to TF32.
    """
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_fp16_accumulation = False
    products.allow_tf32 = False


def linear(x: Tensor, packed: PlainWeight) -> Tensor:
    """See `octavo.kernels.ops.linear`."""
    # A chunk of a prompt that draws nothing has no rows at all.
    if 0 < x.shape[0] <= SKINNY_ROWS and x.dtype != torch.float32:
        return skinny_linear(x, packed)
    return F.linear(x, packed.weight, packed.bias)


def linear_in_slices(x: Tensor, packed: PlainWeight) -> Tensor:
    """As `linear`, by products of SLICE_ROWS rows each, so that a row's sum has one order always.

    The library chooses its kernel by the shape, and kernels differ in the order of their sums.
    """
    rows = x.shape[0]
    if not rows:
        return x.new_empty((0, packed.weight.shape[0]))
    padded = F.pad(x, (0, 0, 0, -rows % SLICE_ROWS))
    parts = [F.linear(part, packed.weight, packed.bias) for part in padded.split(SLICE_ROWS)]
    return torch.cat(parts)[:rows] if len(parts) > 1 else parts[0][:rows]


def skinny_linear(x: Tensor, packed: PlainWeight) -> Tensor:
    """As `linear` for x [T, K] with 1 <= T <= 16."""
    rows, depth = x.shape
    columns = packed.weight.shape[0]
    check(1 <= rows <= _ROWS, "{} rows; the kernel takes 1 to {}", rows, _ROWS)
    check(packed.weight.shape[1] == depth, "x {}, weight {}", x.shape, packed.weight.shape)
    check(packed.weight.dtype == x.dtype, "x {}, weight {}", x.dtype, packed.weight.dtype)
    check_rows_dense("x", x)
    check_rows_dense("weight", packed.weight)
    check_same_device(x, packed.weight)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    _skinny_kernel[(ceil_div(columns, _COLUMNS),)](
        x,
        packed.weight,
        packed.bias,
        out,
        rows,
        x.stride(0),
        packed.weight.stride(0),
        N=columns,
        K=depth,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        num_warps=4,
        num_stages=4,
    )
    return out
