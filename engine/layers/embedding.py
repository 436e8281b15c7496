"""Token embedding."""

import torch
from torch import Tensor

from octavo.kernels import ops


class Embedding:
    """Ids [T] -> rows of `weight` [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype)

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]."""
        return ops.embedding(ids, self.weight)
