"""The gated feed-forward part of a decoder layer."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.config.model import ModelConfig
from octavo.engine.layers.linear import Linear, WeightSlot
from octavo.kernels import ops
from octavo.kernels.step_program import StepProgram


class GatedMLP:
    """down(act(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        inner = config.intermediate_size
        self.hidden_act = config.hidden_act
        self.gate_up = Linear(
            config.hidden_size,
            {"gate_proj": inner, "up_proj": inner},
            dtype,
            bias=config.mlp_bias,
        )
        self.down = Linear(inner, {"down_proj": config.hidden_size}, dtype, bias=config.mlp_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        gate_up = self.gate_up(x)
        if self.hidden_act == "silu":
            inner = ops.silu_and_mul(gate_up)
        else:
            inner = ops.gelu_and_mul(gate_up, tanh=self.hidden_act == "gelu_tanh")
        return self.down(inner)

    def lower(self, program: StepProgram, x: Any) -> Any:  # noqa: ANN401
        """The layer as instructions."""
        inner = program.gated_linear(x, self.gate_up.loaded().packed, self.hidden_act)
        return self.down.lower(program, inner)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, WeightSlot]]:
        """The checkpoint names below `prefix` with their places."""
        yield from self.gate_up.weight_slots(prefix)
        yield from self.down.weight_slots(prefix)
