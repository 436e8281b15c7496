"""The likeliest continuations of beams."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.core.model_output import NOTHING_LEFT, BeamCandidate, TokenLogprobs
from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.input_batch import DrawBatch
from octavo.engine.worker.logprobs import token_logprobs
from octavo.engine.worker.sampler import NOT_FINITE
from octavo.kernels import ops


def beam_candidates(
    logits: Tensor, state: BatchState, rows: NDArray[np.int64]
) -> list[tuple[BeamCandidate, ...] | str]:
    """Candidates of each beam, best first, from raw `logits` fp32 [B, V]; a reason where none.

    `rows` int64 [B] are their rows of the batch state. As in transformers, bias and masks change
    log-softmax values, which are not normalized again; what is masked is no candidate.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    finite = log_probs.isfinite().all(-1).tolist()
    for index, row in enumerate(rows.tolist()):
        adjustments = state.adjustments[row]
        prompt, output = state.prompt_and_output(row)
        if adjustments is not None and finite[index] and adjustments.applies(output.size):
            adjustments.apply(log_probs[index], prompt, output)
    count = min(int(state.num_candidates[rows].max()), log_probs.shape[1])
    values, ids = log_probs.topk(count, dim=-1)
    results: list[tuple[BeamCandidate, ...] | str] = []
    for index, row in enumerate(rows.tolist()):
        wanted = slice(int(state.num_candidates[row]))
        scores = [value for value in values[index, wanted].tolist() if value > -np.inf]
        token_ids = ids[index, wanted].tolist()[: len(scores)]
        if not finite[index]:
            results.append(NOT_FINITE)
        elif not scores:
            results.append(NOTHING_LEFT)
        else:
            records = _records(logits[index], token_ids, int(state.logprobs[row]))
            results.append(tuple(map(BeamCandidate, token_ids, scores, records)))
    return results


def find_candidates(
    logits: Tensor, beams: NDArray[np.int64], state: BatchState, draws: DrawBatch
) -> dict[int, tuple[BeamCandidate, ...] | str]:
    """Candidates by seq_id of the rows `beams` of `logits` fp32 [L, V], or why there are none."""
    if not beams.size:
        return {}
    chosen = logits[torch.from_numpy(beams).to(logits.device)]
    found = beam_candidates(chosen, state, draws.rows[beams])
    seq_ids = [draws.seq_ids[own] for own in draws.own[beams].tolist()]
    return dict(zip(seq_ids, found, strict=True))


def _records(
    logits: Tensor, token_ids: list[int], num_top: int
) -> list[TokenLogprobs] | list[None]:
    """What is reported of each id under `logits` [V]; nothing for a negative `num_top`."""
    if num_top < 0:
        return [None] * len(token_ids)
    ids = torch.tensor(token_ids, device=logits.device)
    scored = ops.score_tokens(logits.expand(len(token_ids), -1), ids, num_top)
    return token_logprobs(scored, token_ids, [num_top] * len(token_ids))
