"""Arguments of the op that prepares queries, keys and values for attention."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Root mean square norm of each query and key head, before the rotation.

    q_weight, k_weight  [D], in the dtype of the heads
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """Row `positions[t]` of the table `cos_sin` rotates token t.

    positions  int64 [T]
    cos_sin    float32 [P, R]: R / 2 cosines, then R / 2 sines
    """

    positions: Tensor
    cos_sin: Tensor
