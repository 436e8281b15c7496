"""What runners ask of a model, and the sizes that they are given."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.engine.attention.metadata import ForwardBatch


class LanguageModel(Protocol):
    """What a runner asks of a model."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, hidden] after the final norm."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits fp32 [L, V] of hidden states [L, hidden]."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes fixed for the life of a runner.

    `window` is the longest sliding window of a model all of whose layers have one.
    """

    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    window: int | None = None
