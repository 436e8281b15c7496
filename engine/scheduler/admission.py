"""Which waiting sequences start or resume in a step."""

import time

from octavo.config.scheduler import SchedulerConfig
from octavo.engine.cache.kv_cache_manager import KVCacheManager
from octavo.engine.core.limits import EngineLimits
from octavo.engine.core.request import Sequence, SequenceStatus
from octavo.engine.scheduler.beam_groups import BeamGroups
from octavo.engine.scheduler.open_sequences import OpenSequences
from octavo.engine.scheduler.outbox import Outbox
from octavo.engine.scheduler.step_plan import StepPlan, chunk_size

# Share of the pool that an admission leaves free (a watermark). Each running sequence takes a
# block every `block_size` steps; a newcomer that took the very last ones would be preempted at
# once.
RESERVED_SHARE = 100

# How many sequences that do not fit are looked at in one step.
MAX_TRIED_PER_STEP = 4


class Admission:
    """Starts waiting sequences in order while blocks, rows and the budget allow.

    A sequence whose next block is being computed by a running one is held back: requests with the
    same uncached prefix that arrive together compute it once, and the later ones find it in the
    prefix cache. Texts cannot change by it, since only blocks that have been written are shared.
    Nobody starves: a hold ends when that one block is written, or its writer is preempted or ends,
    and a running sequence computes a token or more in every step. Those behind a held sequence go
    on meanwhile, since it keeps nothing from them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        limits: EngineLimits,
        kv_cache: KVCacheManager,
        open_sequences: OpenSequences,
        beams: BeamGroups,
        outbox: Outbox,
    ) -> None:
        self._chunk_threshold = config.long_prefill_token_threshold
        self._num_reserved_blocks = -(-limits.num_blocks // RESERVED_SHARE)
        self._kv_cache = kv_cache
        self._open = open_sequences
        self._beams = beams
        self._outbox = outbox
        self.num_cache_queries = 0
        self.num_cache_hits = 0

    @property
    def is_possible(self) -> bool:
        """True when a sequence waits and a row is free."""
        return len(self._open.waiting) > 0 and self._open.num_free_rows > 0

    def admit(self, plan: StepPlan) -> None:
        """Add waiting sequences to the step."""
        waiting = self._open.waiting
        head: Sequence | None = None  # the first that does not fit
        num_tried = 0
        for sequence in waiting.snapshot() if self.is_possible else ():
            if plan.budget == 0 or self._open.num_free_rows <= 0 or num_tried == MAX_TRIED_PER_STEP:
                break
            if head is not None and not waiting.may_be_passed(head):
                break
            if self._kv_cache.awaits_block(sequence):
                continue
            swapped = sequence.status is SequenceStatus.SWAPPED
            if self._swap_in(plan, sequence) if swapped else self._start(plan, sequence):
                if head is not None:
                    waiting.record_pass(head)
            elif not self._kv_cache.awaits_block(sequence):
                head = head or sequence
                num_tried += 1

    def _start(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Start or resume a sequence if blocks allow.

        All its known tokens must fit beside what running prompts still need and a reserve, not
        only its first chunk: a prompt cut off half way would be computed for nothing. Alone it
        always fits.
        """
        kv_cache = self._kv_cache
        num_kept = self._num_kept_blocks(plan) + self._beams.num_parked_blocks(sequence)
        rows = self._beams.num_rows(sequence)
        if kv_cache.num_free_blocks <= num_kept or self._open.num_free_rows < rows:
            return False
        target = self._beams.target(sequence)
        hits = [] if needs_whole_prompt(sequence) else kv_cache.get_computed_blocks(sequence)
        if kv_cache.awaits_block(sequence):
            return False
        del hits[(target - 1) // kv_cache.block_size :]
        num_hit_tokens = len(hits) * kv_cache.block_size
        num_tokens = self._chunk_size(plan, target - num_hit_tokens)
        num_later_blocks = kv_cache.blocks_for(target) - kv_cache.blocks_for(
            num_hit_tokens + num_tokens
        )
        allocation = kv_cache.allocate_slots(
            sequence, num_tokens, hits, num_kept + num_later_blocks
        )
        if allocation is None:
            return False
        self._open.waiting.remove(sequence)
        self._open.run(sequence)
        self._beams.reserve_rows()
        sequence.advance(num_hit_tokens)
        kv_cache.announce(sequence)
        self._note_start(sequence, num_hit_tokens)
        plan.add(sequence, num_tokens, allocation)
        plan.num_owed_blocks += num_later_blocks + self._beams.num_parked_blocks(sequence)
        return True

    def _swap_in(self, plan: StepPlan, leader: Sequence) -> bool:
        """Bring back a swapped sequence, with the beams of its group, if all of it fits."""
        kv_cache = self._kv_cache
        members = self._beams.swapped_members(leader)
        num_parked_blocks = self._beams.num_parked_blocks(leader)
        needed = kv_cache.num_swap_in_blocks(members) + num_parked_blocks
        if needed + self._num_kept_blocks(plan) > kv_cache.num_free_blocks:
            return False
        if self._open.num_free_rows < self._beams.num_rows(leader):
            return False
        self._open.waiting.remove(leader)
        kv_cache.swap_in(members)
        for member in members:
            self._open.parked.pop(member.seq_id, None)
            self._open.run(member)
        self._beams.reserve_rows()
        for member in members:
            self._schedule_member(plan, member)
        plan.num_owed_blocks += num_parked_blocks
        return True

    def _schedule_member(self, plan: StepPlan, member: Sequence) -> None:
        num_wanted = self._beams.target(member) - member.num_computed_tokens
        if num_wanted and plan.budget:
            num_tokens = self._chunk_size(plan, num_wanted)
            allocation = self._kv_cache.allocate_slots(member, num_tokens)
            assert allocation is not None, member.seq_id
            plan.add(member, num_tokens, allocation)
        self._kv_cache.announce(member)
        plan.num_owed_blocks += self._kv_cache.num_missing_blocks(member)

    def _num_kept_blocks(self, plan: StepPlan) -> int:
        """Blocks that a newcomer must leave free."""
        running = len(self._open.running) > 0
        return self._num_reserved_blocks + plan.num_owed_blocks if running else 0

    def _chunk_size(self, plan: StepPlan, num_wanted: int) -> int:
        others = len(self._open.waiting) > 1 and self._open.num_free_rows > 1
        return chunk_size(num_wanted, plan.budget, int(others), self._chunk_threshold)

    def _note_start(self, sequence: Sequence, num_hit_tokens: int) -> None:
        whole = needs_whole_prompt(sequence)
        if whole:
            self._outbox.prompt_logprobs[sequence.seq_id] = []
        # Only the first start counts: a resume must change neither usage nor metrics.
        request = sequence.request
        if request.scheduled_time is None:
            request.scheduled_time = time.monotonic()
            self._outbox.note_start(request)
            sequence.num_cached_tokens = num_hit_tokens
            if not whole:
                self.num_cache_queries += sequence.num_prompt_tokens
                self.num_cache_hits += num_hit_tokens


def needs_whole_prompt(sequence: Sequence) -> bool:
    """True when every prompt position has to be computed, so that no cached block may be used."""
    return sequence.request.params.needs_whole_prompt and sequence.num_output_tokens == 0
