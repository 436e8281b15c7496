"""From logits to tokens, each row by its own settings.

Order: raw logits (logprobs are taken here), bias, penalties, masks, temperature, min_p, top_k,
top_p, draw. Greedy rows take the highest logit after the masks, the lowest id on a tie.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.core.model_output import NOTHING_LEFT, TokenLogprobs
from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.input_batch import DrawBatch
from octavo.engine.worker.logprobs import token_logprobs
from octavo.engine.worker.random_streams import uniforms
from octavo.kernels import ops
from octavo.kernels.sampling_args import SamplingFilters

NOT_FINITE = "the model produced logits that are not finite (NaN or infinity)"


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results of D draws.

    token_ids   int64 [D]; meaningless where the draw failed
    logprobs    by draw, where asked for
    failed      reasons by draw
    """

    token_ids: NDArray[np.int64]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class TokenSampler(Protocol):
    """What a runner asks of a sampler."""

    def sample(self, logits: Tensor, state: BatchState, draws: DrawBatch) -> Sampled:
        """One token per draw from `logits` fp32 [L, V], which may be overwritten."""


class Sampler:
    """Draws tokens from the first `vocab_size` columns of logits; columns past them are padding."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def sample(self, logits: Tensor, state: BatchState, draws: DrawBatch) -> Sampled:
        """One token per draw from `logits` fp32 [L, V], which is overwritten."""
        logits = logits[:, : self._vocab_size]
        best, best_ids = ops.argmax(logits)
        finite = np.isfinite(best.cpu().numpy())
        if finite.all() and state.plain[draws.rows].all():
            return Sampled(best_ids.cpu().numpy()[draws.logits_rows])
        # A row of NaN has no best tokens to report.
        wanted = (state.logprobs[draws.rows] >= 0) & finite
        scored = np.flatnonzero(wanted[draws.logits_rows])
        raw = self._take(logits, draws.logits_rows[scored]) if scored.size else None

        reasons = {int(row): NOT_FINITE for row in np.flatnonzero(~finite)}
        adjusted = self._adjust(logits, state, draws.rows, finite)
        if adjusted:
            rows = self._index(np.array(adjusted, np.int64))
            best, best_ids[rows] = ops.argmax(logits[rows])
            for row, value in zip(adjusted, best.tolist(), strict=True):
                if not np.isfinite(value):
                    reasons[row] = NOTHING_LEFT

        token_ids = best_ids.cpu().numpy()[draws.logits_rows]
        usable = np.ones(draws.rows.size, np.bool_)
        usable[list(reasons)] = False
        self._draw(logits, state, draws, usable, token_ids)

        failed = {
            draw: reasons[row]
            for draw, row in enumerate(draws.logits_rows.tolist())
            if row in reasons
        }
        if raw is None:
            return Sampled(token_ids, failed=failed)
        num_top = state.logprobs[draws.rows][draws.logits_rows[scored]]
        return Sampled(token_ids, self._score(raw, scored, token_ids[scored], num_top), failed)

    def _adjust(
        self,
        logits: Tensor,
        state: BatchState,
        rows: NDArray[np.int64],
        finite: NDArray[np.bool_],
    ) -> list[int]:
        """Applies the adjustments of each row in place; returns the rows of logits changed."""
        adjusted: list[int] = []
        for index, row in enumerate(rows.tolist()):
            adjustments = state.adjustments[row]
            if adjustments is None or not finite[index]:
                continue
            prompt, output = state.prompt_and_output(row)
            if adjustments.applies(output.size):
                adjustments.apply(logits[index], prompt, output)
                adjusted.append(index)
        return adjusted

    def _draw(
        self,
        logits: Tensor,
        state: BatchState,
        draws: DrawBatch,
        usable: NDArray[np.bool_],
        token_ids: NDArray[np.int64],
    ) -> None:
        """Replaces the ids of draws that are not greedy."""
        rows = draws.rows[draws.logits_rows]
        random = ~state.greedy[rows] & usable[draws.logits_rows]
        if not random.any():
            return
        numbers = uniforms(state.seeds[rows], draws.choices, state.num_output_tokens(rows))
        filtered = state.filtered[rows]
        plain = np.flatnonzero(random & ~filtered)
        if plain.size:
            drawn = ops.draw(
                logits,
                self._index(draws.logits_rows[plain]),
                self._index(state.temperature[rows[plain]]),
                self._index(numbers[plain]),
            )
            token_ids[plain] = drawn.cpu().numpy()
        narrowed = np.flatnonzero(random & filtered)
        if narrowed.size:
            chosen = rows[narrowed]
            filters = SamplingFilters(
                temperature=self._index(state.temperature[chosen]),
                min_p=self._index(state.min_p[chosen]),
                top_k=self._index(state.top_k[chosen]),
                top_p=self._index(state.top_p[chosen]),
            )
            drawn = ops.draw_filtered(
                logits,
                self._index(draws.logits_rows[narrowed]),
                filters,
                self._index(numbers[narrowed]),
            )
            token_ids[narrowed] = drawn.cpu().numpy()

    def _score(
        self,
        raw: Tensor,
        scored: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        num_top: NDArray[np.int64],
    ) -> dict[int, TokenLogprobs]:
        scores = ops.score_tokens(raw, self._index(token_ids), int(num_top.max()))
        records = token_logprobs(scores, token_ids.tolist(), num_top.tolist())
        return dict(zip(scored.tolist(), records, strict=True))

    def _take(self, logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
        return logits.index_select(0, self._index(rows))

    def _index(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
