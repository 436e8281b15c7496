"""Carries out plans on a device that runs beside the host: launched now, waited for later.

The host packs what the device cannot know, and the device takes the ids that it drew itself. So
a step can be launched before the results of the one before are there.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.core.model_output import ModelOutput, Wait
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.decode_graphs import DecodeGraph, DecodeGraphs
from octavo.engine.worker.device_results import DeviceResults, StepResults
from octavo.engine.worker.device_step import Bounds, DeviceRows, DeviceStep
from octavo.engine.worker.device_stream import DeviceStream
from octavo.engine.worker.input_batch import DrawBatch, StepRows, draw_batch, step_rows
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import LanguageModel, RunnerLimits
from octavo.engine.worker.packed_step import StepInputs, StepPacker, StepShape
from octavo.engine.worker.pooler import Pooler
from octavo.engine.worker.row_updates import RowUpdates


class DeviceRunner:
    """Holds the model, `kv_cache` and the rows of running sequences. One thread uses it."""

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KVCache,
        limits: RunnerLimits,
        stream: DeviceStream,
        bounds: Bounds,
    ) -> None:
        self.kv_cache = kv_cache
        self.limits = limits
        self._stream = stream
        self._bounds = bounds
        self._state = BatchState.of(limits, kv_cache.layout)
        self._pooler = Pooler()
        self._updates = RowUpdates(self._state, self._pooler, limits, stream.device)
        self._packer = StepPacker(self._state)
        width = self._state.block_tables.shape[1]
        self._rows = DeviceRows(limits.max_num_seqs, width, limits.vocab_size, stream.device)
        self._step = DeviceStep(model, kv_cache, self._rows, limits)
        self._results = DeviceResults(model, self._state, self._pooler, limits, stream)
        self._graphs: DecodeGraphs | None = None
        self._no_staging = torch.empty(0, dtype=torch.int64, device=stream.device)
        self._unsettled: list[StepResults] = []

    @property
    def row_bytes(self) -> int:
        """Bytes on the device that the rows take, beside model and cache."""
        return self._rows.num_bytes

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked."""
        self._stream.synchronize()

    @torch.inference_mode()
    def record(self, sizes: list[int]) -> int:
        """Records decode steps of so many rows; returns the number of graphs.

        No sequence may be running.
        """
        self._graphs = DecodeGraphs(
            self._stream, self._step, sizes, self._bounds.seq_lens, self.limits.vocab_size
        )
        return len(self._graphs)

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        """Runs one step and waits for it."""
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> Wait:
        """Starts one step; the call that is returned waits for its results.

        Steps have to be waited for in the order of their launch; those launched before a failure
        are given up.
        """
        changes = self._updates.apply(plan)
        self._stream.submit(lambda: self.kv_cache.move_blocks(plan))
        state = self._state
        if not plan.scheduled:
            return lambda: ModelOutput({})
        step = step_rows(state, plan.scheduled)
        draws = draw_batch(state, plan.scheduled, step, self._pooler)
        results = self._results.begin(plan, step, draws)
        graph = None if results.needs_host else self._find_graph(step, draws)
        size = None if graph is None else graph.size
        shape, words = self._packer.pack(step, draws, results.scored, changes, size)
        self._launch_forward(results, (shape, words), step, graph)
        state.num_computed[step.rows] += step.num_tokens
        if results.needs_ids:
            # The device is busy with the forward pass while the ids before are taken in.
            self._settle(self._unsettled)
        results.take_histories()
        self._launch_draws(results, draws, graph)
        self._unsettled.append(results)
        return lambda: self._wait(results)

    def _find_graph(self, step: StepRows, draws: DrawBatch) -> DecodeGraph | None:
        count = step.rows.size
        plain = int(step.start[-1]) == count == draws.rows.size == len(draws.seq_ids)
        if self._graphs is None or not plain:
            return None
        return self._graphs.find(step.first + 1)

    def _launch_forward(
        self,
        results: StepResults,
        packed: tuple[StepShape, NDArray[np.int64]],
        step: StepRows,
        graph: DecodeGraph | None,
    ) -> None:
        shape, words = packed
        graphs = self._graphs
        staging = self._no_staging if graphs is None else graphs.staging
        target = self._stream.upload(words, staging)
        longest = self._bounds.of(step.num_tokens, step.first + step.num_tokens)

        def forward() -> None:
            inputs = results.inputs = StepInputs.of(target, shape)
            self._rows.change(inputs)
            if graphs is None or graph is None:
                hidden, results.logits = self._step.forward(inputs, longest)
                results.hidden = hidden if results.needs_host else None
            else:
                graphs.take(target)
                graph.forward()
                results.logits = graph.logits

        self._stream.submit(forward)

    def _launch_draws(
        self, results: StepResults, draws: DrawBatch, graph: DecodeGraph | None
    ) -> None:
        def draw(inputs: StepInputs, logits: Tensor) -> Tensor:
            if graph is None:
                return self._step.draw(inputs, logits)
            graph.draw()
            return graph.ids

        results.launch(draw if draws.seq_ids else None)

    def _settle(self, steps: list[StepResults]) -> None:
        """Takes in the ids of steps. After a failure none is waited for again."""
        try:
            for results in steps:
                results.settle()
        except Exception:
            self._unsettled.clear()
            raise

    @torch.inference_mode()
    def _wait(self, results: StepResults) -> ModelOutput:
        self._settle([results])
        # Steps before it that nobody waited for were given up.
        del self._unsettled[: self._unsettled.index(results) + 1]
        return results.output()
