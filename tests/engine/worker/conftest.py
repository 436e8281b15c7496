"""A stand-in scheduler and a model whose logits after a token are a row of a table."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.engine.attention.metadata import ForwardBatch, KVCacheLayout
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import (
    Fork,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
)
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import LanguageModel, RunnerLimits
from octavo.engine.worker.model_runner import ModelRunner

CPU = torch.device("cpu")


class TableModel:
    """Logits after token t are row t of `table` [V, V]; writes the ids it reads into the cache."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = torch.from_numpy(np.asarray(table, np.float32))
        self.batches: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.batches.append(batch)
        for cache in batch.kv_caches:
            slots = batch.attention.slot_mapping
            size = cache.key.shape[2]
            cache.key[slots // size, :, slots % size] = batch.input_ids.float()[:, None, None]
        return self.table[batch.input_ids]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden.clone()


@dataclass
class Tracked:
    """What a scheduler knows of a sequence."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    index: int
    seed: int
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    entered: bool = False


class Driver:
    """Schedules all sequences in every step, in the order in which they were added."""

    def __init__(self, model: LanguageModel, layout: KVCacheLayout, limits: RunnerLimits) -> None:
        self.block_size = layout.block_size
        self.kv_cache = KVCache(layout, 2, CPU)
        self.runner = ModelRunner(model, self.kv_cache, limits, CPU)
        self.sequences: dict[int, Tracked] = {}
        self.outputs: list[ModelOutput] = []
        self._free = list(range(layout.num_blocks - 1, -1, -1))
        self._removed: list[int] = []
        self._copies: list[tuple[int, int]] = []

    def add(
        self,
        seq_id: int,
        prompt: list[int],
        params: SamplingParams | None = None,
        index: int = 0,
        seed: int = 0,
        output: tuple[int, ...] = (),
    ) -> None:
        params = params or SamplingParams(max_tokens=100, temperature=0)
        tokens = [*prompt, *output]
        self.sequences[seq_id] = Tracked(tokens, len(prompt), params, index, seed)

    def remove(self, seq_id: int) -> Tracked:
        """Takes a sequence out, as finished or preempted."""
        tracked = self.sequences.pop(seq_id)
        self._free += tracked.block_ids
        self._removed.append(seq_id)
        return tracked

    def preempt(self, seq_id: int) -> None:
        """Takes a sequence out and queues it again with all its tokens."""
        tracked = self.remove(seq_id)
        self.step()
        self.sequences[seq_id] = Tracked(
            tracked.token_ids,
            tracked.num_prompt_tokens,
            tracked.params,
            tracked.index,
            tracked.seed,
        )

    def copy_block(self, source: int) -> int:
        """Plans a copy of a block for the next step; returns its new id."""
        destination = self._free.pop()
        self._copies.append((source, destination))
        return destination

    def step(
        self, chunk: int = 1000, forks: dict[int, tuple[Fork, ...]] | None = None
    ) -> ModelOutput:
        """Computes up to `chunk` tokens of every sequence."""
        new: list[NewSequence] = []
        scheduled: list[ScheduledSequence] = []
        for seq_id, tracked in self.sequences.items():
            known = len(tracked.token_ids)
            count = min(chunk, known - tracked.num_computed)
            end = tracked.num_computed + count
            offset = len(tracked.block_ids)
            added = [self._free.pop() for _ in range(-(-end // self.block_size) - offset)]
            tracked.block_ids += added
            if not tracked.entered:
                new.append(
                    NewSequence(
                        seq_id,
                        tracked.index,
                        tuple(tracked.token_ids),
                        tracked.num_prompt_tokens,
                        tracked.num_computed,
                        tuple(tracked.block_ids),
                        tracked.params,
                        tracked.seed,
                    )
                )
                added, tracked.entered = [], True
            here = (forks or {}).get(seq_id, ())
            scheduled.append(
                ScheduledSequence(seq_id, count, offset, tuple(added), end == known, here)
            )
            tracked.num_computed = end
        plan = SchedulerOutput(
            0, tuple(new), tuple(scheduled), tuple(self._removed), tuple(self._copies)
        )
        self._removed, self._copies = [], []
        output = self.runner.execute(plan)
        self.outputs.append(output)
        for seq_id, ids in output.sampled.items():
            if seq_id in self.sequences:
                self.sequences[seq_id].token_ids += ids
        return output

    def run(self, num_output_tokens: int, chunk: int = 1000) -> dict[int, list[int]]:
        """Steps until every sequence has so many generated ids, and returns these."""
        while any(
            len(tracked.token_ids) - tracked.num_prompt_tokens < num_output_tokens
            for tracked in self.sequences.values()
        ):
            self.step(chunk)
        return {
            seq_id: tracked.token_ids[tracked.num_prompt_tokens :][:num_output_tokens]
            for seq_id, tracked in self.sequences.items()
        }


@pytest.fixture
def make_driver() -> Callable[..., Driver]:
    """Makes a driver for a model or for a table of logits."""

    def make(
        model: LanguageModel | np.ndarray,
        *,
        vocab_size: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        num_blocks: int = 64,
        block_size: int = 4,
        heads: tuple[int, int] = (1, 1),
    ) -> Driver:
        if isinstance(model, np.ndarray):
            vocab_size = vocab_size or model.shape[1]
            model = TableModel(model)
        assert vocab_size is not None
        layout = KVCacheLayout(num_blocks, heads[0], block_size, heads[1], torch.float32)
        limits = RunnerLimits(32, num_blocks * block_size, vocab_size, eos_token_ids)
        return Driver(model, layout, limits)

    return make
