"""Scales of a cache in e4m3."""

import torch
from torch import Tensor

_E4M3_MAX = 448.0
# Under heads whose weights are all zero.
_SMALLEST = 2.0**-100


def e4m3_scales(bounds: Tensor) -> Tensor:
    """One scale per head, float32 [H], so that `bounds` [H, D] over the scale fit into e4m3.

    Powers of two: dividing by them rounds nothing. The bounds may be far from what occurs, since
    e4m3 has the same precision over 15 powers of two.
    """
    largest = (bounds.amax(-1) / _E4M3_MAX).clamp(min=_SMALLEST)
    return torch.exp2(torch.ceil(torch.log2(largest)))
