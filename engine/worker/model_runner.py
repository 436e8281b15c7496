"""Carries out the plan of a step: rows, forward pass, sampling."""

import numpy as np
import torch
from torch import Tensor

from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.beam_candidates import find_candidates
from octavo.engine.worker.input_batch import DrawBatch, draw_batch, forward_batch, step_rows
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import LanguageModel, RunnerLimits
from octavo.engine.worker.pooler import Pooler
from octavo.engine.worker.prompt_scores import PromptScorer, scored_places
from octavo.engine.worker.row_updates import RowUpdates
from octavo.engine.worker.sampler import Sampler, TokenSampler


class ModelRunner:
    """Holds the model, `kv_cache` and the rows of running sequences. One thread uses it."""

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KVCache,
        limits: RunnerLimits,
        device: torch.device,
        sampler: TokenSampler | None = None,
    ) -> None:
        """`sampler` stands in for the one that draws as the requests ask."""
        self._model = model
        self.kv_cache = kv_cache
        self.limits = limits
        self._device = device
        self._sampler = sampler or Sampler(limits.vocab_size, device)
        self._pooler = Pooler()
        self._state = BatchState.of(limits, kv_cache.layout)
        self._updates = RowUpdates(self._state, self._pooler, limits, device)
        self._scorer = PromptScorer(model, self._state, limits.vocab_size, device)

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked: it has, when `execute` returns."""

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        """Runs one step. Each sampled id is known to the rows of the next step."""
        self._updates.apply(plan)
        self.kv_cache.move_blocks(plan)
        if not plan.scheduled:
            return ModelOutput({})
        state = self._state
        step = step_rows(state, plan.scheduled)
        draws = draw_batch(state, plan.scheduled, step, self._pooler)
        batch = forward_batch(state, step, draws, self.kv_cache.layers, self._device)
        hidden = self._model.forward(batch)
        prompt_logprobs, failed = self._scorer.score(
            plan.scheduled, step, scored_places(self._state, step), hidden
        )
        embeddings, not_finite = self._pooler.pool(plan.scheduled, step, hidden)
        read = ModelOutput({}, {}, prompt_logprobs, failed | not_finite, embeddings)
        state.num_computed[step.rows] += step.num_tokens
        if not draws.seq_ids:
            return read
        # Where every token draws, as in most steps, they are so in order.
        if draws.rows.size < hidden.shape[0]:
            hidden = hidden.index_select(0, batch.logits_indices)
        return self._sample(self._model.compute_logits(hidden), draws, read)

    def _sample(self, logits: Tensor, draws: DrawBatch, read: ModelOutput) -> ModelOutput:
        """Adds the draws, and the candidates of beams, to what was read off the hidden states."""
        state = self._state
        beams = np.flatnonzero(state.num_candidates[draws.rows])
        found = find_candidates(logits[:, : self.limits.vocab_size], beams, state, draws)
        sampled = self._sampler.sample(logits, state, draws)
        # Forks get rows of their own when they are scheduled, and beams are told how they go on.
        drawn = np.flatnonzero(state.num_candidates[draws.rows] == 0)
        state.append(draws.rows[drawn], sampled.token_ids[draws.own[drawn]])
        failed = dict(read.failed)
        failed |= {draws.seq_ids[draw]: reason for draw, reason in sampled.failed.items()}
        failed |= {seq_id: item for seq_id, item in found.items() if isinstance(item, str)}
        token_ids = zip(sampled.token_ids.tolist(), strict=True)
        by_id = dict(zip(draws.seq_ids, token_ids, strict=True))
        for seq_id in (*failed, *found):
            by_id.pop(seq_id, None)
        return ModelOutput(
            sampled=by_id,
            logprobs={
                draws.seq_ids[draw]: (record,)
                for draw, record in sampled.logprobs.items()
                if draws.seq_ids[draw] not in failed
            },
            prompt_logprobs=read.prompt_logprobs,
            failed=failed,
            embeddings=read.embeddings,
            candidates={
                seq_id: item
                for seq_id, item in found.items()
                if seq_id not in failed and not isinstance(item, str)
            },
        )
