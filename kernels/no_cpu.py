"""Stands in for the CPU's kernels where they cannot be imported: none of them may be used."""

import torch


def usable(dtype: torch.dtype) -> bool:
    """False for every `dtype`."""
    return False


def can_sample() -> bool:
    """False."""
    return False


def can_quantize(dtype: torch.dtype) -> bool:
    """False for every `dtype`."""
    return False
