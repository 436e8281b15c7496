"""Carries out the plan of a step: rows, forward pass, sampling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.attention.metadata import ForwardBatch, KVCacheLayout
from octavo.engine.core.model_output import BeamCandidate, ModelOutput, TokenLogprobs
from octavo.engine.core.scheduler_output import NewSequence, ScheduledSequence, SchedulerOutput
from octavo.engine.worker.adjustments import make_adjustments
from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.beam_candidates import beam_candidates
from octavo.engine.worker.input_batch import (
    DrawBatch,
    StepRows,
    draw_batch,
    forward_batch,
    step_rows,
)
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.logprobs import token_logprobs
from octavo.engine.worker.pooler import Pooler
from octavo.engine.worker.sampler import NOT_FINITE, Sampler
from octavo.kernels import ops

# Prompt positions scored at once: their logits take 4 bytes per position and id.
_SCORED_POSITIONS = 64


class LanguageModel(Protocol):
    """What the runner asks of a model."""

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


class ModelRunner:
    """Holds the model, the cache and the rows of running sequences. One thread uses it."""

    def __init__(
        self, model: LanguageModel, kv_cache: KVCache, limits: RunnerLimits, device: torch.device
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self.limits = limits
        self._device = device
        self._sampler = Sampler(limits.vocab_size, device)
        self._pooler = Pooler()
        self._state = BatchState(
            limits.max_num_seqs,
            limits.max_model_len,
            kv_cache.layout.block_size,
            limits.vocab_size,
            limits.window,
            null_block=kv_cache.layout.num_blocks,
        )

    @property
    def layout(self) -> KVCacheLayout:
        """Shape of the cache of one layer."""
        return self._kv_cache.layout

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory."""
        return self._kv_cache.num_host_blocks

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        """Runs one step. Each sampled id is known to the rows of the next step."""
        self._update_rows(plan)
        self._kv_cache.swap_out(plan.swap_out)
        self._kv_cache.swap_in(plan.swap_in)
        self._kv_cache.copy_blocks(plan.block_copies)
        if not plan.scheduled:
            return ModelOutput({})
        state = self._state
        step = step_rows(state, plan.scheduled)
        draws = draw_batch(state, plan.scheduled, step, self._pooler)
        batch = forward_batch(state, step, draws, self._kv_cache.layers, self._device)
        hidden = self._model.forward(batch)
        prompt_logprobs, failed = self._score_prompts(plan.scheduled, step, hidden)
        embeddings, not_finite = self._pooler.pool(plan.scheduled, step, hidden)
        read = ModelOutput({}, {}, prompt_logprobs, failed | not_finite, embeddings)
        state.num_computed[step.rows] += step.num_tokens
        if not draws.seq_ids:
            return read
        logits = self._model.compute_logits(hidden[batch.logits_indices])
        return self._sample(logits, draws, read)

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for seq_id in plan.removed_seq_ids:
            self._state.remove(seq_id)
            self._pooler.remove(seq_id)
        for sequence in plan.new_sequences:
            self._add(sequence)
        for item in plan.scheduled:
            if item.new_block_ids:
                (row,) = self._state.rows_of((item.seq_id,)).tolist()
                self._state.set_blocks(row, item.block_offset, item.new_block_ids)
            for token_id in item.new_token_ids:
                self._state.append(self._state.rows_of((item.seq_id,)), np.array([token_id]))

    def _add(self, sequence: NewSequence) -> None:
        limits = self.limits
        adjustments = make_adjustments(
            sequence.params, limits.eos_token_ids, limits.vocab_size, self._device
        )
        params = sequence.params
        wanted = params.num_beam_candidates(limits.eos_token_ids) if params.use_beam_search else 0
        self._state.add(sequence, adjustments, wanted)
        self._pooler.add(sequence)

    def _sample(self, logits: Tensor, draws: DrawBatch, read: ModelOutput) -> ModelOutput:
        """Adds the draws, and the candidates of beams, to what was read off the hidden states."""
        state = self._state
        beams = np.flatnonzero(state.num_candidates[draws.rows])
        found = self._find_candidates(logits, beams, draws)
        sampled = self._sampler.sample(logits, state, draws)
        # Forks get rows of their own when they are scheduled, and beams are told how they go on.
        drawn = np.flatnonzero(state.num_candidates[draws.rows] == 0)
        state.append(draws.rows[drawn], sampled.token_ids[draws.own[drawn]])
        failed = {**read.failed}
        failed |= {draws.seq_ids[draw]: reason for draw, reason in sampled.failed.items()}
        failed |= {seq_id: item for seq_id, item in found.items() if isinstance(item, str)}
        return ModelOutput(
            sampled={
                seq_id: (token_id,)
                for seq_id, token_id in zip(draws.seq_ids, sampled.token_ids.tolist(), strict=True)
                if seq_id not in failed and seq_id not in found
            },
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

    def _find_candidates(
        self, logits: Tensor, beams: NDArray[np.int64], draws: DrawBatch
    ) -> dict[int, tuple[BeamCandidate, ...] | str]:
        """Candidates by seq_id of the rows `beams` of the logits, or why there are none."""
        if not beams.size:
            return {}
        chosen = logits[torch.from_numpy(beams).to(self._device), : self.limits.vocab_size]
        found = beam_candidates(chosen, self._state, draws.rows[beams])
        seq_ids = [draws.seq_ids[own] for own in draws.own[beams].tolist()]
        return dict(zip(seq_ids, found, strict=True))

    def _score_prompts(
        self, scheduled: Sequence[ScheduledSequence], step: StepRows, hidden: Tensor
    ) -> tuple[dict[int, tuple[TokenLogprobs, ...]], dict[int, str]]:
        """Scores the prompt tokens that follow the positions computed in this step."""
        records: dict[int, tuple[TokenLogprobs, ...]] = {}
        failed: dict[int, str] = {}
        wanted = self._state.prompt_logprobs[step.rows]
        for place in np.flatnonzero(wanted >= 0).tolist():
            row, first = int(step.rows[place]), int(step.first[place])
            last = min(first + int(step.num_tokens[place]), self._state.num_prompt_tokens[row] - 1)
            # The prompt is the same for all choices, and choice 0 reports it.
            if last <= first or self._state.choices[row] != 0:
                continue
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
            logits = self._model.compute_logits(hidden[part])[:, : self.limits.vocab_size]
            best, _ = ops.argmax(logits)
            if not bool(best.isfinite().all()):
                return None
            token_ids = torch.from_numpy(targets[part]).to(self._device)
            scores = ops.score_tokens(logits, token_ids, int(num_top))
            counts = [int(num_top)] * token_ids.shape[0]
            records += token_logprobs(scores, targets[part].tolist(), counts)
        return tuple(records)
