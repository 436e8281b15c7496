"""Linear layers, and the places of their tensors in a checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.engine.core.errors import OctavoError
from octavo.kernels import ops
from octavo.kernels.step_program import StepProgram


class Linear:
    """One or several projections of the same input, stacked: [T, in_features] -> [T, sum of parts].

    `parts` maps the checkpoint's name of each projection to its output features, in order. Before
    `pack` the layer holds `weight` [N, K] and `bias` [N] for loading; afterwards only `packed`, in
    the form the kernels want. A given `weight` is shared with its owner, not copied (tied heads).
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        dtype: torch.dtype,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
    ) -> None:
        self.in_features = in_features
        self.parts = dict(parts)
        out_features = sum(parts.values())
        if weight is None:
            weight = torch.empty(out_features, in_features, dtype=dtype)
        self.weight: Tensor | None = weight
        self.bias: Tensor | None = torch.empty(out_features, dtype=dtype) if bias else None
        self.packed: ops.LinearWeight | None = None

    def pack(self) -> None:
        """Hands the loaded tensors to the kernels and lets go of them."""
        if self.weight is None:
            raise OctavoError("a linear layer was packed twice")
        self.packed = ops.pack_linear(self.weight, self.bias)
        self.weight = self.bias = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, N]."""
        return ops.linear(x, self.loaded())

    def logits(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> fp32 [T, N], rounded to the dtype of `x`."""
        return ops.logits(x, self.loaded())

    def loaded(self) -> ops.LinearWeight:
        """The packed weight; raises OctavoError before `pack`."""
        if self.packed is None:
            raise OctavoError("a linear layer was used before its weights were loaded")
        return self.packed

    def lower(self, program: StepProgram, x: Any) -> Any:  # noqa: ANN401
        """The layer as an instruction."""
        return program.linear(x, self.loaded().packed)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, "WeightSlot"]]:
        """The checkpoint names below `prefix` with their places; before `pack` only."""
        start = 0
        for name, features in self.parts.items():
            rows = slice(start, start + features)
            for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
                if tensor is not None:
                    yield f"{prefix}{name}.{kind}", WeightSlot(tensor[rows], self)
            start += features


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one checkpoint tensor belongs.

    `target` is the memory to fill. `layer` is the linear layer to pack once all its slots are
    filled, or None for a tensor that is used as it is.
    """

    target: Tensor
    layer: Linear | None = None
