"""Sequences come and go: what a plan changes in the rows, before anything is computed."""

from typing import NamedTuple

import numpy as np
import torch

from octavo.engine.core.scheduler_output import NewSequence, SchedulerOutput
from octavo.engine.worker.adjustments import make_adjustments
from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.language_model import RunnerLimits
from octavo.engine.worker.pooler import Pooler


class TableChange(NamedTuple):
    """Entries of the block table of `row` from `offset` on; `enters` where its sequence is new."""

    row: int
    offset: int
    block_ids: tuple[int, ...]
    enters: bool = False


class RowUpdates:
    """Applies the changes of plans to the rows."""

    def __init__(
        self, state: BatchState, pooler: Pooler, limits: RunnerLimits, device: torch.device
    ) -> None:
        self._state = state
        self._pooler = pooler
        self._limits = limits
        self._device = device

    def apply(self, plan: SchedulerOutput) -> list[TableChange]:
        """Frees, fills and extends rows; returns what changed in the block tables."""
        state = self._state
        for seq_id in plan.removed_seq_ids:
            state.remove(seq_id)
            self._pooler.remove(seq_id)
        changes = [self._add(sequence) for sequence in plan.new_sequences]
        for item in plan.scheduled:
            if item.new_block_ids:
                (row,) = state.rows_of((item.seq_id,)).tolist()
                state.set_blocks(row, item.block_offset, item.new_block_ids)
                changes.append(TableChange(row, item.block_offset, item.new_block_ids))
            for token_id in item.new_token_ids:
                state.append(state.rows_of((item.seq_id,)), np.array([token_id]))
        return changes

    def _add(self, sequence: NewSequence) -> TableChange:
        limits, params = self._limits, sequence.params
        adjustments = make_adjustments(
            params, limits.eos_token_ids, limits.vocab_size, self._device
        )
        wanted = params.num_beam_candidates(limits.eos_token_ids) if params.use_beam_search else 0
        row = self._state.add(sequence, adjustments, wanted)
        self._pooler.add(sequence)
        return TableChange(row, 0, sequence.block_ids, enters=True)
