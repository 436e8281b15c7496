"""Rotary position embedding over NeoX halves."""

import torch
from torch import Tensor


def rotary_embedding(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.ops.rotary_embedding`."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]; cos and sin [T, 1, R / 2]."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
