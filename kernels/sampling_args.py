"""Arguments of the sampling ops."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingFilters:
    """Per-row settings of filtered draws, one entry per row drawn, on the device of the logits.

    temperature   float32 [N]   above 0
    min_p         float64 [N]   0 is off
    top_k         int64 [N]     0 is off
    top_p         float64 [N]   above 0; 1 is off
    """

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor

    def take(self, rows: Tensor) -> "SamplingFilters":
        """The settings of `rows` (int64)."""
        return SamplingFilters(
            self.temperature[rows], self.min_p[rows], self.top_k[rows], self.top_p[rows]
        )


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Log-softmax values at N positions.

    logprobs      float32 [N]      of the tokens asked about
    ranks         int64 [N]        1 for the best; of equal values the lower id ranks first
    top_ids       int64 [N, K]     the best tokens, best first, ties to the lowest id
    top_logprobs  float32 [N, K]
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
