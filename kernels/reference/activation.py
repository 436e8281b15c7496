"""Gated activations, rounded between the two factors as transformers does."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `octavo.kernels.ops.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(gate_up: Tensor, tanh: bool) -> Tensor:
    """See `octavo.kernels.ops.gelu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh" if tanh else "none") * up
