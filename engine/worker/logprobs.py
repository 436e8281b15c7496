"""Logprob records from scored tokens."""

from collections.abc import Sequence

from octavo.engine.core.model_output import TokenLogprobs
from octavo.kernels.sampling_args import ScoredTokens


def token_logprobs(
    scored: ScoredTokens, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """One record per scored token, with `num_top[i]` of the best alternatives each."""
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for token_id, logprob, rank, ids, values, count in zip(
            token_ids,
            scored.logprobs.tolist(),
            scored.ranks.tolist(),
            scored.top_ids.tolist(),
            scored.top_logprobs.tolist(),
            num_top,
            strict=True,
        )
    ]
