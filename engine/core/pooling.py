"""Which hidden states stand for a text, and what a checkpoint says of its embeddings."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Embedding = NDArray[np.float32]
"""A vector of length 1: fp32 [hidden]."""


class Pooling(StrEnum):
    """How the hidden states of a sequence become one vector, before it is brought to length 1."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """How a checkpoint makes embeddings.

    `dimensions` holds the lengths to which it allows a vector to be cut (Matryoshka training);
    none by default.
    """

    pooling: Pooling = Pooling.LAST
    dimensions: Collection[int] = ()


DEFAULT_EMBEDDING = EmbeddingSpec()
"""What holds for a decoder that says nothing of embeddings: its last token."""
