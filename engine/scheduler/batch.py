"""What the worker knows of the sequences, so that each plan tells it only what is new."""

from collections.abc import Callable

from octavo.engine.cache.block_table import UNCHANGED, Allocation
from octavo.engine.cache.kv_cache_manager import KVCacheManager
from octavo.engine.core.request import Sequence
from octavo.engine.core.scheduler_output import (
    Fork,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
)
from octavo.engine.scheduler.step_plan import StepPlan

PlanForks = Callable[[Sequence], tuple[Fork, ...]]


class Batch:
    """Sequences that hold a row of the worker, and those whose row it has to be told to free."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._rows: set[int] = set()
        self._removed: list[int] = []
        # A plain decode is the same item step after step, so it is made once.
        self._decode_items: dict[int, ScheduledSequence] = {}
        # Ids of beams that the worker does not know yet.
        self._unsent: dict[int, tuple[int, ...]] = {}
        self.num_steps = 0

    def send_tokens(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Tell the worker of ids that it did not draw itself, with the sequence's next item."""
        if sequence.seq_id in self._rows:
            self._unsent[sequence.seq_id] = token_ids

    def remove(self, sequence: Sequence) -> None:
        """Free the row of a sequence, if it has one."""
        self._decode_items.pop(sequence.seq_id, None)
        self._unsent.pop(sequence.seq_id, None)
        if sequence.seq_id in self._rows:
            self._rows.remove(sequence.seq_id)
            self._removed.append(sequence.seq_id)

    def clear(self) -> None:
        """Free all rows."""
        self._removed.extend(sorted(self._rows))
        self._rows.clear()
        self._decode_items.clear()
        self._unsent.clear()

    def make_output(self, plan: StepPlan, plan_forks: PlanForks) -> SchedulerOutput:
        """Freeze a plan. `plan_forks` names the choices that a prompt's last row will draw for."""
        new_sequences: list[NewSequence] = []
        scheduled: list[ScheduledSequence] = []
        block_copies: list[tuple[int, int]] = []
        for seq_id, (sequence, num_tokens, allocation) in plan.entries.items():
            item = self._decode_items.get(seq_id) if allocation is UNCHANGED else None
            if item is None:
                block_copies.extend(allocation.block_copies)
                if seq_id not in self._rows:
                    self._rows.add(seq_id)
                    new_sequences.append(self._new_sequence(sequence))
                    allocation = UNCHANGED
                item = self._make_item(sequence, num_tokens, allocation, plan_forks)
            scheduled.append(item)
        removed, self._removed = tuple(self._removed), []
        self.num_steps += 1
        return SchedulerOutput(
            self.num_steps,
            tuple(new_sequences),
            tuple(scheduled),
            removed,
            tuple(block_copies),
            *self._kv_cache.take_transfers(),
        )

    def check_integrity(self, running: set[int]) -> None:
        """Assert that only `running` sequences hold rows."""
        assert self._rows <= running
        assert set(self._decode_items) <= self._rows
        assert set(self._unsent) <= self._rows

    def _new_sequence(self, sequence: Sequence) -> NewSequence:
        return NewSequence(
            seq_id=sequence.seq_id,
            index=sequence.index,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=sequence.num_computed_tokens,
            block_ids=self._kv_cache.block_ids(sequence),
            params=sequence.request.params,
            seed=sequence.request.seed,
        )

    def _make_item(
        self, sequence: Sequence, num_tokens: int, allocation: Allocation, plan_forks: PlanForks
    ) -> ScheduledSequence:
        sample = sequence.num_computed_tokens + num_tokens == sequence.num_tokens
        first = sample and sequence.num_output_tokens == 0
        item = ScheduledSequence(
            seq_id=sequence.seq_id,
            num_tokens=num_tokens,
            block_offset=allocation.block_offset,
            new_block_ids=allocation.new_block_ids,
            sample=sample,
            forks=plan_forks(sequence) if first else (),
            new_token_ids=self._unsent.pop(sequence.seq_id, ()),
        )
        repeats = not (first or sequence.request.params.use_beam_search)
        if sample and repeats and num_tokens == 1 and allocation is UNCHANGED:
            self._decode_items[sequence.seq_id] = item
        return item
