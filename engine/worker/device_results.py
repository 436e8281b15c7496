"""What comes back of a step that was launched: ids, log-probabilities, failures."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.core.model_output import NOTHING_LEFT, ModelOutput, TokenLogprobs
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.worker.adjustments import LogitAdjustments
from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.beam_candidates import find_candidates
from octavo.engine.worker.device_stream import DeviceStream, Download
from octavo.engine.worker.input_batch import DrawBatch, StepRows
from octavo.engine.worker.language_model import LanguageModel, RunnerLimits
from octavo.engine.worker.logprobs import token_logprobs
from octavo.engine.worker.packed_step import StepInputs
from octavo.engine.worker.pooler import Pooler
from octavo.engine.worker.prompt_scores import PromptScorer, scored_places
from octavo.engine.worker.sampler import NOT_FINITE
from octavo.kernels import ops
from octavo.kernels.sampling_args import ScoredTokens

Draw = Callable[[StepInputs, Tensor], Tensor]
History = tuple[int, LogitAdjustments, NDArray[np.int32]]


class DeviceResults:
    """Makes the results of steps over one batch state."""

    def __init__(
        self,
        model: LanguageModel,
        state: BatchState,
        pooler: Pooler,
        limits: RunnerLimits,
        stream: DeviceStream,
    ) -> None:
        self.state = state
        self.pooler = pooler
        self.stream = stream
        self.scorer = PromptScorer(model, state, limits.vocab_size, stream.device)

    def begin(self, plan: SchedulerOutput, step: StepRows, draws: DrawBatch) -> "StepResults":
        """The results to be of a step that is about to be launched."""
        return StepResults(self, plan, step, draws)


class StepResults:
    """One step, from its launch to its output.

    What depends on the rows is read before the launch: once the step after has been launched, a row
    may belong to another sequence. Scored prompts, embeddings and beams alone are read once the
    step is waited for, and before that nothing is launched behind them. `inputs`, `hidden` and
    `logits` are set by the device; what is not read then is let go of at once, since the next step
    needs the memory while this one is waited for.
    """

    def __init__(
        self, owner: DeviceResults, plan: SchedulerOutput, step: StepRows, draws: DrawBatch
    ) -> None:
        state = owner.state
        self._owner = owner
        self._plan = plan
        self._step = step
        self._draws = draws
        self.inputs: StepInputs | None = None
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None
        is_beam = state.num_candidates[draws.rows] > 0
        self._beams = np.flatnonzero(is_beam)
        self._drawn = np.flatnonzero(~is_beam)
        self._places = state.num_tokens[draws.rows[self._drawn]]
        wanted = (state.logprobs[draws.rows] >= 0) & ~is_beam
        self.scored = np.flatnonzero(wanted[draws.logits_rows])
        self._num_top = state.logprobs[draws.rows][draws.logits_rows[self.scored]]
        self._scoring = scored_places(state, step)
        self._pools = any(item.seq_id in owner.pooler for item in plan.scheduled)
        self._adjusted = self._find_adjusted(state, is_beam)
        self._histories: list[History] = []
        self._download: Download | None = None
        self._arrays: list[NDArray[Any]] | None = None

    @property
    def needs_ids(self) -> bool:
        """Whether masks depend on what has been generated, which the host has to know."""
        return any(adjustments.bad_words for _, adjustments in self._adjusted)

    @property
    def needs_host(self) -> bool:
        """Whether more is read from the step than draws, for which no graph leaves anything."""
        return bool(self._beams.size or self._scoring.size) or self._pools

    def take_histories(self) -> None:
        """Copies the texts on which masks depend; with `needs_ids` they must be known by now."""
        state, rows = self._owner.state, self._draws.rows
        for index, adjustments in self._adjusted:
            _, output = state.prompt_and_output(int(rows[index]))
            self._histories.append((index, adjustments, output.copy()))

    def launch(self, draw: Draw | None) -> None:
        """Lets the device draw, and send what comes out; without draws it only says when."""
        if draw is None:
            self._download = self._owner.stream.download(tuple)
            return
        self._download = self._owner.stream.download(lambda: self._compute(draw))
        state, rows = self._owner.state, self._draws.rows[self._drawn]
        state.append(rows, np.full(rows.size, -1))

    def settle(self) -> None:
        """Waits, and writes the ids into the rows; later calls do nothing."""
        if self._arrays is not None:
            return
        assert self._download is not None, "a step that was not launched"
        self._arrays = self._download.wait()
        if self._arrays:
            draws, own = self._draws, self._draws.own[self._drawn]
            seq_ids = [draws.seq_ids[index] for index in own.tolist()]
            rows = draws.rows[self._drawn]
            self._owner.state.settle(seq_ids, rows, self._places, self._arrays[0][0][own])

    def output(self) -> ModelOutput:
        """The results, after `settle`."""
        read = self._read_hidden()
        arrays, draws = self._arrays, self._draws
        if not arrays:
            return read
        count = len(draws.seq_ids)
        ids, finite, left = arrays[0][:, :count]
        sampled = dict(zip(draws.seq_ids, zip(ids.tolist(), strict=True), strict=True))
        failed = dict(read.failed)
        if not left.all():
            for draw in np.flatnonzero(left == 0).tolist():
                failed[draws.seq_ids[draw]] = NOTHING_LEFT if finite[draw] else NOT_FINITE
        found = self._find_candidates()
        failed |= {seq_id: item for seq_id, item in found.items() if isinstance(item, str)}
        for seq_id in (*failed, *found):
            sampled.pop(seq_id, None)
        return ModelOutput(
            sampled=sampled,
            logprobs=self._read_logprobs(arrays, ids, failed),
            prompt_logprobs=read.prompt_logprobs,
            failed=failed,
            embeddings=read.embeddings,
            candidates={
                seq_id: item
                for seq_id, item in found.items()
                if seq_id not in failed and not isinstance(item, str)
            },
        )

    def _compute(self, draw: Draw) -> Sequence[Tensor]:
        """On the device: (id, finite, left) of each draw, then the scores that are wanted."""
        inputs, logits = self.inputs, self.logits
        assert inputs is not None and logits is not None
        if not self._beams.size:
            self.logits = None
        finite = left = logits.amax(-1).isfinite()
        raw = None
        if self.scored.size:
            raw = logits.index_select(0, inputs.logits_rows[inputs.scored])
        for index, adjustments, output in self._histories:
            # Penalties between the two change nothing that is masked.
            adjustments.add_bias(logits[index])
            adjustments.mask(logits[index], output)
        if self._histories:
            left = finite & logits.amax(-1).isfinite()
        ids = draw(inputs, logits)
        rows = inputs.logits_rows
        results = torch.stack((ids, finite[rows].long(), left[rows].long()))
        if raw is None:
            return (results,)
        scores = ops.score_on_device(raw, ids[inputs.scored], int(self._num_top.max()))
        return (results, scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)

    def _find_adjusted(
        self, state: BatchState, is_beam: NDArray[np.bool_]
    ) -> list[tuple[int, LogitAdjustments]]:
        rows = self._draws.rows
        return [
            (index, adjustments)
            for index, row in enumerate(rows.tolist())
            if (adjustments := state.adjustments[row]) is not None
            and not is_beam[index]
            and adjustments.masks(int(state.num_output_tokens(rows[index : index + 1])[0]))
        ]

    def _read_hidden(self) -> ModelOutput:
        """What is read off the hidden states: scores of prompts, and embeddings."""
        if not (self._scoring.size or self._pools):
            return ModelOutput({})
        assert self.hidden is not None
        scheduled, owner = self._plan.scheduled, self._owner
        scores, failed = owner.scorer.score(scheduled, self._step, self._scoring, self.hidden)
        embeddings, not_finite = owner.pooler.pool(scheduled, self._step, self.hidden)
        return ModelOutput({}, {}, scores, failed | not_finite, embeddings)

    def _find_candidates(self) -> dict[int, Any]:
        if not self._beams.size:
            return {}
        assert self.logits is not None
        return find_candidates(self.logits, self._beams, self._owner.state, self._draws)

    def _read_logprobs(
        self, arrays: list[NDArray[Any]], ids: NDArray[np.int64], failed: dict[int, str]
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        if not self.scored.size:
            return {}
        scores = ScoredTokens(*(torch.from_numpy(array) for array in arrays[1:]))
        records = token_logprobs(scores, ids[self.scored].tolist(), self._num_top.tolist())
        seq_ids = [self._draws.seq_ids[draw] for draw in self.scored.tolist()]
        return {
            seq_id: (record,)
            for seq_id, record in zip(seq_ids, records, strict=True)
            if seq_id not in failed
        }
