"""Linear layers and embeddings."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_SLICE_ELEMENTS = 1 << 20
"""Weight elements widened at once: 4 MiB of fp32, which stays in a CPU's last-level cache."""

_NARROW_ROWS = 2
"""Up to this many rows the product is bound by reading the weight, and torch reads it as it is."""


_BOUND_ROWS = 4096


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """weight [N, K] and bias [N] as they came."""

    weight: Tensor
    bias: Tensor | None


def pack_linear(weight: Tensor, bias: Tensor | None) -> PlainWeight:
    """See `octavo.kernels.ops.pack_linear`."""
    return PlainWeight(weight, bias)


def linear(x: Tensor, packed: PlainWeight) -> Tensor:
    """See `octavo.kernels.ops.linear`."""
    weight, bias = packed.weight, packed.bias
    half_on_cpu = weight.device.type == "cpu" and weight.dtype != torch.float32
    if half_on_cpu and x.shape[0] > _NARROW_ROWS:
        return _linear_widened(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_in_slices(x: Tensor, packed: PlainWeight) -> Tensor:
    """See `octavo.kernels.ops.fixed_shapes`: the reference takes one row after the other."""
    if not x.shape[0]:
        return linear(x, packed)
    return torch.cat([linear(x[row : row + 1], packed) for row in range(x.shape[0])])


def output_bounds(packed: PlainWeight, factors: Tensor) -> Tensor:
    """See `octavo.kernels.ops.output_bounds`."""
    weight, wide = packed.weight, factors.float()
    norms = torch.empty(weight.shape[0], device=weight.device)
    # In parts, so that a large weight is not held in fp32 as a whole.
    for start in range(0, weight.shape[0], _BOUND_ROWS):
        part = slice(start, start + _BOUND_ROWS)
        norms[part] = torch.linalg.vector_norm(weight[part].float() * wide, dim=1)
    bounds = norms.mul_(factors.shape[0] ** 0.5)
    return bounds if packed.bias is None else bounds + packed.bias.float().abs()


def _linear_widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Without half-precision dot products a CPU is faster at widening slices of the weight."""
    rows, columns = weight.shape
    step = max(1, _SLICE_ELEMENTS // columns)
    wide_x = x.float()
    out = torch.empty((x.shape[0], rows), dtype=x.dtype)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        product = wide_x @ weight[part].float().t()
        if bias is not None:
            product += bias[part].float()
        out[:, part] = product
    return out


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """See `octavo.kernels.ops.embedding`."""
    return F.embedding(ids, weight)
