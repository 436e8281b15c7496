"""Root mean square norm, alone and together with the residual addition."""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.step_program import StepProgram


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

    def lower(self, program: StepProgram, x: Any, residual: Any) -> Any:  # noqa: ANN401
        """The layer as an instruction; without an `x` only the residual is normed."""
        if x is None:
            return program.rms_norm(residual, self.weight, self.eps)
        return program.add_rms_norm(x, residual, self.weight, self.eps)
