"""Log-probabilities of the tokens of prompts."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.core.model_output import TokenLogprobs
from octavo.engine.core.scheduler_output import ScheduledSequence
from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.input_batch import StepRows
from octavo.engine.worker.language_model import LanguageModel
from octavo.engine.worker.logprobs import token_logprobs
from octavo.engine.worker.sampler import NOT_FINITE
from octavo.kernels import ops

# Prompt positions scored at once: their logits take 4 bytes per position and id.
_SCORED_POSITIONS = 64


def scored_places(state: BatchState, step: StepRows) -> NDArray[np.int64]:
    """Places in the step of the sequences whose prompt is scored in it; before it draws.

    The prompt is the same for all choices, and choice 0 reports it. A sequence that is computed
    again behind its first output has reported it already.
    """
    rows = step.rows
    wanted = state.prompt_logprobs[rows] >= 0
    if not wanted.any():
        return np.empty(0, np.int64)
    wanted &= state.choices[rows] == 0
    inside = step.first < state.num_prompt_tokens[rows] - 1
    return np.flatnonzero(wanted & inside & (state.num_output_tokens(rows) == 0))


class PromptScorer:
    """Scores the prompt tokens that follow the positions computed in a step."""

    def __init__(
        self, model: LanguageModel, state: BatchState, vocab_size: int, device: torch.device
    ) -> None:
        self._model = model
        self._state = state
        self._vocab_size = vocab_size
        self._device = device

    def score(
        self,
        scheduled: Sequence[ScheduledSequence],
        step: StepRows,
        places: NDArray[np.int64],
        hidden: Tensor,
    ) -> tuple[dict[int, tuple[TokenLogprobs, ...]], dict[int, str]]:
        """Records by seq_id from hidden states [T, hidden], and why there are none.

        `places` are those of `scored_places`, taken before the draws of the step.
        """
        records: dict[int, tuple[TokenLogprobs, ...]] = {}
        failed: dict[int, str] = {}
        wanted = self._state.prompt_logprobs[step.rows]
        for place in places.tolist():
            row, first = int(step.rows[place]), int(step.first[place])
            last = min(first + int(step.num_tokens[place]), self._state.num_prompt_tokens[row] - 1)
            start = int(step.start[place])
            targets = self._state.token_ids[row, first + 1 : last + 1].astype(np.int64)
            scored = self._score(hidden[start : start + targets.size], targets, wanted[place])
            if scored is None:
                failed[scheduled[place].seq_id] = NOT_FINITE
            else:
                records[scheduled[place].seq_id] = scored
        return records, failed

    def _score(
        self, hidden: Tensor, targets: NDArray[np.int64], num_top: int
    ) -> tuple[TokenLogprobs, ...] | None:
        """Records for `targets` [P] under the logits of `hidden` [P, hidden]; None for NaN."""
        records: list[TokenLogprobs] = []
        for start in range(0, targets.size, _SCORED_POSITIONS):
            part = slice(start, start + _SCORED_POSITIONS)
            logits = self._model.compute_logits(hidden[part])[:, : self._vocab_size]
            best, _ = ops.argmax(logits)
            if not bool(best.isfinite().all()):
                return None
            token_ids = torch.from_numpy(targets[part]).to(self._device)
            scores = ops.score_tokens(logits, token_ids, int(num_top))
            counts = [int(num_top)] * token_ids.shape[0]
            records += token_logprobs(scores, targets[part].tolist(), counts)
        return tuple(records)
