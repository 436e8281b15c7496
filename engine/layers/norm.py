"""Root mean square norm, alone and together with the residual addition."""

import torch
from torch import Tensor

from octavo.kernels import ops


class RMSNorm:
    """`weight` [size], applied over the last dimension."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        self.eps = eps
        self.weight = torch.empty(size, dtype=dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); without a residual x stands for the sum."""
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
