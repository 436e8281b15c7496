"""Root mean square norm with Llama's rounding order."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo.kernels.ops.rms_norm`."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * inverse).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.ops.add_rms_norm`."""
    total = residual + x
    return rms_norm(total, weight, eps), total
