"""Decides what each step computes, and what its results mean for the sequences."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from octavo.config.scheduler import SchedulerConfig
from octavo.engine.cache.kv_cache_manager import UNCHANGED, Allocation, KVCacheManager
from octavo.engine.core.limits import EngineLimits
from octavo.engine.core.model_output import ModelOutput, TokenLogprobs
from octavo.engine.core.pooling import Embedding
from octavo.engine.core.request import FinishReason, Request, Sequence, SequenceStatus
from octavo.engine.core.request_output import EngineStats, SequenceDelta
from octavo.engine.core.scheduler_output import (
    Fork,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
)
from octavo.engine.scheduler.queue import ORDERS, OrderedSequences, WaitingQueue
from octavo.engine.scheduler.step_plan import StepPlan, chunk_size

# Share of the pool that an admission leaves free. Each running sequence takes a block every
# `block_size` steps; a newcomer that took the very last ones would be preempted at once.
RESERVED_SHARE = 100

# Looking up a member of an enum costs more than the rest of the test in which these stand.
_RUNNING = SequenceStatus.RUNNING
_STOP, _LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Scheduler:
    """One mechanism: a step lets `num_computed_tokens` of each sequence catch up with its tokens.

    Prefill, chunks, prefix hits, resume after preemption and decode are all this. Called from the
    engine thread only; `schedule` and `update_from_output` alternate, all else happens between
    steps.
    """

    def __init__(
        self, config: SchedulerConfig, limits: EngineLimits, kv_cache: KVCacheManager
    ) -> None:
        self._limits = limits
        self._kv_cache = kv_cache
        self._eos_token_ids = frozenset(limits.eos_token_ids)
        self._chunk_threshold = config.long_prefill_token_threshold
        self._num_reserved_blocks = -(-limits.num_blocks // RESERVED_SHARE)
        order = ORDERS[config.scheduling_policy]
        self._waiting = WaitingQueue(order)
        self._running = OrderedSequences(order)
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._next_seq_id = 0
        # Sequences that the worker knows, and those it has to be told to drop.
        self._rows: set[int] = set()
        self._removed: list[int] = []
        # A plain decode is the same item step after step, so it is made once.
        self._decode_items: dict[int, ScheduledSequence] = {}
        self._children: dict[int, list[Sequence]] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._deltas: list[SequenceDelta] = []
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_cache_queries = 0
        self._num_cache_hits = 0
        self._last_step_tokens = 0

    # Requests come and go, between steps.

    def add_request(self, request: Request) -> None:
        """Queue a request. It must fit the limits, and its id must not be open."""
        assert request.request_id not in self._requests, request.request_id
        self._requests[request.request_id] = request
        self._waiting.add(self._new_choice(request, index=0))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End all choices of a request, or one; unknown or finished ones are left alone."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for sequence in list(request.sequences):
            if not sequence.finished and index in (None, sequence.index):
                self._end(sequence, FinishReason.ABORT)
        for unborn in list(_unborn_choices(request)):
            if index in (None, unborn):
                self._end_unborn(request, unborn, FinishReason.ABORT)
        if not any(not sequence.finished for sequence in request.sequences):
            self._replace_first_sequence(request)

    def _replace_first_sequence(self, request: Request) -> None:
        # The one sequence that computed the prompt is gone before the fork: the next choice takes
        # its part, and finds what was computed in the prefix cache.
        for index in list(_unborn_choices(request))[:1]:
            self._waiting.add(self._new_choice(request, index))

    def has_request(self, request_id: str) -> bool:
        """True while a choice of the request is open."""
        return request_id in self._requests

    @property
    def has_requests(self) -> bool:
        """True while a request is open, so that `schedule` has something to plan."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """True when a step has something to compute or to hand out."""
        return bool(self._requests or self._deltas)

    # First half of a step.

    def schedule(self) -> SchedulerOutput:
        """Plan one step: running decodes, running prefills, then the waiting queue.

        There must be an open request.
        """
        plan = StepPlan(self._limits.max_num_batched_tokens)
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        assert plan.entries, "open requests, and none can go on"
        return self._make_output(plan)

    def _schedule_running(self, plan: StepPlan) -> None:
        prefills = []
        for sequence in self._running.snapshot():
            num_wanted = sequence.num_tokens - sequence.num_computed_tokens
            if num_wanted > 1:
                prefills.append(sequence)
            elif sequence.status is _RUNNING:
                self._schedule_next(plan, sequence, 1)
        for position, sequence in enumerate(prefills):
            if plan.budget == 0:
                break
            if sequence.status is _RUNNING:
                num_others = len(prefills) - 1 - position + self._can_admit
                num_wanted = sequence.num_tokens - sequence.num_computed_tokens
                num_tokens = chunk_size(num_wanted, plan.budget, num_others, self._chunk_threshold)
                self._schedule_next(plan, sequence, num_tokens)
            if sequence.status is _RUNNING:
                plan.num_owed_blocks += self._kv_cache.num_missing_blocks(sequence)

    def _schedule_next(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> None:
        allocation = self._kv_cache.allocate_slots(sequence, num_tokens)
        while allocation is None:
            victim = self._running.last
            self._preempt(plan, victim)
            if victim is sequence:
                return
            allocation = self._kv_cache.allocate_slots(sequence, num_tokens)
        plan.add(sequence, num_tokens, allocation)

    def _preempt(self, plan: StepPlan, victim: Sequence) -> None:
        plan.drop(victim)
        self._running.remove(victim)
        self._kv_cache.free(victim)
        self._drop_row(victim)
        self._prompt_logprobs.pop(victim.seq_id, None)
        victim.preempt()
        self._waiting.add(victim)
        self._num_preemptions += 1

    def _schedule_waiting(self, plan: StepPlan) -> None:
        position = 0
        while plan.budget > 0 and self._can_admit and position < self._waiting.num_candidates:
            if not self._admit(plan, self._waiting.candidate(position)):
                position += 1
            elif position > 0:
                self._waiting.record_pass()

    @property
    def _can_admit(self) -> bool:
        """True when a sequence waits and a row is free."""
        return len(self._waiting) > 0 and len(self._running) < self._limits.max_num_seqs

    def _admit(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Start or resume a waiting sequence if blocks allow.

        All its known tokens must fit beside what running prompts still need and a reserve, not
        only its first chunk: a prompt cut off half way would be computed for nothing. Alone it
        always fits.
        """
        kv_cache = self._kv_cache
        num_kept = self._num_reserved_blocks + plan.num_owed_blocks if len(self._running) else 0
        if kv_cache.num_free_blocks <= num_kept:
            return False
        hits = [] if _needs_whole_prompt(sequence) else kv_cache.get_computed_blocks(sequence)
        num_hit_tokens = len(hits) * kv_cache.block_size
        num_wanted = sequence.num_tokens - num_hit_tokens
        others = len(self._waiting) > 1 and len(self._running) + 1 < self._limits.max_num_seqs
        num_tokens = chunk_size(num_wanted, plan.budget, int(others), self._chunk_threshold)
        num_later_blocks = kv_cache.blocks_for(sequence.num_tokens) - kv_cache.blocks_for(
            num_hit_tokens + num_tokens
        )
        allocation = kv_cache.allocate_slots(
            sequence, num_tokens, hits, num_kept + num_later_blocks
        )
        if allocation is None:
            return False
        self._waiting.remove(sequence)
        sequence.run()
        sequence.advance(num_hit_tokens)
        self._running.add(sequence)
        self._note_start(sequence, num_hit_tokens)
        plan.add(sequence, num_tokens, allocation)
        plan.num_owed_blocks += num_later_blocks
        return True

    def _note_start(self, sequence: Sequence, num_hit_tokens: int) -> None:
        if _needs_whole_prompt(sequence):
            self._prompt_logprobs[sequence.seq_id] = []
        # Only the first start counts: a resume must change neither usage nor metrics.
        request = sequence.request
        if request.scheduled_time is None:
            request.scheduled_time = time.monotonic()
            sequence.num_cached_tokens = num_hit_tokens
            if not _needs_whole_prompt(sequence):
                self._num_cache_queries += sequence.num_prompt_tokens
                self._num_cache_hits += num_hit_tokens

    def _make_output(self, plan: StepPlan) -> SchedulerOutput:
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
                item = self._make_item(sequence, num_tokens, allocation)
            scheduled.append(item)
        removed, self._removed = tuple(self._removed), []
        self._num_steps += 1
        self._last_step_tokens = self._limits.max_num_batched_tokens - plan.budget
        return SchedulerOutput(
            self._num_steps, tuple(new_sequences), tuple(scheduled), removed, tuple(block_copies)
        )

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
        self, sequence: Sequence, num_tokens: int, allocation: Allocation
    ) -> ScheduledSequence:
        sample = sequence.num_computed_tokens + num_tokens == sequence.num_tokens
        first = sample and sequence.num_output_tokens == 0
        item = ScheduledSequence(
            seq_id=sequence.seq_id,
            num_tokens=num_tokens,
            block_offset=allocation.block_offset,
            new_block_ids=allocation.new_block_ids,
            sample=sample,
            forks=self._plan_forks(sequence) if first else (),
        )
        if sample and not first and num_tokens == 1 and allocation is UNCHANGED:
            self._decode_items[sequence.seq_id] = item
        return item

    def _plan_forks(self, parent: Sequence) -> tuple[Fork, ...]:
        children = [
            self._new_choice(parent.request, index) for index in _unborn_choices(parent.request)
        ]
        if children:
            self._children[parent.seq_id] = children
        return tuple([Fork(child.seq_id, child.index) for child in children])

    # Second half of a step.

    def update_from_output(self, plan: SchedulerOutput, output: ModelOutput) -> list[SequenceDelta]:
        """Take in the results of a step; return all deltas since the last call."""
        for item in plan.scheduled:
            sequence = self._sequences[item.seq_id]
            failure = output.failed.get(item.seq_id) if output.failed else None
            if failure is None:
                self._advance(sequence, item.num_tokens, output)
            if item.forks:
                self._place_children(sequence)
            if failure is not None:
                self._fail(sequence, failure, item.forks)
            elif item.sample:
                self._accept(sequence, output)
                for fork in item.forks:
                    self._accept_child(self._sequences[fork.seq_id], output)
        return self.take_deltas()

    def take_deltas(self) -> list[SequenceDelta]:
        """All deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _advance(self, sequence: Sequence, num_tokens: int, output: ModelOutput) -> None:
        sequence.advance(num_tokens)
        if sequence.num_computed_tokens % self._kv_cache.block_size < num_tokens:
            self._kv_cache.cache_full_blocks(sequence)
        if self._prompt_logprobs:
            buffer = self._prompt_logprobs.get(sequence.seq_id, [])
            buffer.extend(output.prompt_logprobs.get(sequence.seq_id, ()))

    def _accept(self, sequence: Sequence, output: ModelOutput) -> None:
        """Append the sampled id, decide whether the text ends, and hand it out."""
        seq_id, request = sequence.seq_id, sequence.request
        prompt_logprobs = self._take_prompt_logprobs(seq_id) if self._prompt_logprobs else None
        if request.params.max_tokens == 0:
            embedding = output.embeddings.get(seq_id)
            self._end(sequence, _LENGTH, prompt_logprobs=prompt_logprobs, embedding=embedding)
            return
        token_ids = output.sampled[seq_id]
        sequence.append_tokens(token_ids)
        reason, stop_reason = self._end_of_text(sequence, token_ids[-1])
        self._deltas.append(
            SequenceDelta(
                request.request_id,
                sequence.index,
                token_ids,
                output.logprobs.get(seq_id, ()),
                prompt_logprobs,
                reason,
                stop_reason,
                None,
                sequence.num_cached_tokens,
                request.scheduled_time,
            )
        )
        if reason is not None:
            self._close(sequence, reason, stop_reason)

    def _take_prompt_logprobs(self, seq_id: int) -> tuple[TokenLogprobs, ...] | None:
        scored = self._prompt_logprobs.pop(seq_id, None)
        return None if scored is None else tuple(scored)

    def _end_of_text(
        self, sequence: Sequence, token_id: int
    ) -> tuple[FinishReason | None, int | None]:
        """The reason to end after `token_id`, if any, and the client's stop id that matched."""
        params = sequence.request.params
        num_tokens = sequence.num_tokens
        num_output_tokens = num_tokens - sequence.num_prompt_tokens
        # The sampler masks end tokens up to min_tokens; one that comes by then ends nothing.
        if num_output_tokens > params.min_tokens:
            if token_id in params.stop_token_ids:
                return _STOP, token_id
            if token_id in self._eos_token_ids and not params.ignore_eos:
                return _STOP, None
        if num_output_tokens >= params.max_tokens or num_tokens >= self._limits.max_model_len:
            return _LENGTH, None
        return None, None

    def _place_children(self, parent: Sequence) -> None:
        """Let the children share the parent's blocks, or wait where no row is free."""
        for child in self._children.pop(parent.seq_id):
            child.num_cached_tokens = parent.num_cached_tokens
            if len(self._running) < self._limits.max_num_seqs:
                self._kv_cache.fork(parent, child)
                child.run()
                child.advance(parent.num_computed_tokens)
                self._running.add(child)
            else:
                self._waiting.add(child)

    def _accept_child(self, child: Sequence, output: ModelOutput) -> None:
        failure = output.failed.get(child.seq_id)
        if failure is None:
            self._accept(child, output)
        else:
            self._end(child, FinishReason.ERROR, error=failure)

    def _fail(self, sequence: Sequence, reason: str, forks: SequenceOf[Fork]) -> None:
        """End a sequence whose row could not be used, and the choices that hang on that row."""
        request = sequence.request
        self._end(sequence, FinishReason.ERROR, error=reason)
        for fork in forks:
            self._end(self._sequences[fork.seq_id], FinishReason.ERROR, error=reason)
        for unborn in list(_unborn_choices(request)):
            self._end_unborn(request, unborn, FinishReason.ERROR, reason)

    # Sequences begin and end.

    def _new_choice(self, request: Request, index: int) -> Sequence:
        sequence = Sequence(self._next_seq_id, request, index, request.prompt_token_ids)
        self._next_seq_id += 1
        request.sequences.append(sequence)
        self._sequences[sequence.seq_id] = sequence
        return sequence

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
        embedding: Embedding | None = None,
    ) -> None:
        """End a sequence without a new id."""
        request = sequence.request
        self._deltas.append(
            SequenceDelta(
                request_id=request.request_id,
                index=sequence.index,
                token_ids=(),
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                error=error,
                num_cached_tokens=sequence.num_cached_tokens,
                scheduled_time=request.scheduled_time,
                embedding=embedding,
            )
        )
        self._close(sequence, reason)

    def _end_unborn(
        self, request: Request, index: int, reason: FinishReason, error: str | None = None
    ) -> None:
        """End a choice that never got as far as the fork."""
        sequence = self._new_choice(request, index)
        self._waiting.add(sequence)
        self._end(sequence, reason, error)

    def _close(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | None = None
    ) -> None:
        """Give back all that a sequence holds; its terminal delta has been handed out."""
        if sequence.status is _RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.finish(reason, stop_reason)
        self._kv_cache.remove(sequence)
        self._drop_row(sequence)
        self._prompt_logprobs.pop(sequence.seq_id, None)
        del self._sequences[sequence.seq_id]
        if sequence.request.finished:
            del self._requests[sequence.request.request_id]

    def _drop_row(self, sequence: Sequence) -> None:
        self._decode_items.pop(sequence.seq_id, None)
        if sequence.seq_id in self._rows:
            self._rows.remove(sequence.seq_id)
            self._removed.append(sequence.seq_id)

    # What others may look at.

    def stats(self) -> EngineStats:
        """Counters and gauges; running and waiting count requests, not choices."""
        running = {id(sequence.request) for sequence in self._running.snapshot()}
        return EngineStats(
            num_running=len(running),
            num_waiting=len(self._requests) - len(running),
            num_blocks=self._kv_cache.num_blocks,
            num_used_blocks=self._kv_cache.num_used_blocks,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._num_cache_queries,
            prefix_cache_hits=self._num_cache_hits,
            num_steps=self._num_steps,
            last_step_tokens=self._last_step_tokens,
        )

    def check_integrity(self) -> None:
        """Assert that queue, running sequences, requests and blocks agree; between steps only."""
        self._kv_cache.check_integrity()
        self._running.check_integrity()
        self._waiting.check_integrity()
        running, waiting = self._running.snapshot(), self._waiting.snapshot()
        assert len(running) <= self._limits.max_num_seqs
        assert all(sequence.status is _RUNNING for sequence in running)
        assert all(sequence.status is SequenceStatus.WAITING for sequence in waiting)
        open_ids = {sequence.seq_id for sequence in running + waiting}
        assert open_ids == set(self._sequences) and len(open_ids) == len(running) + len(waiting)
        assert self._rows <= {sequence.seq_id for sequence in running}
        assert set(self._decode_items) <= self._rows and not self._children
        assert set(self._prompt_logprobs) <= self._rows
        for request in self._requests.values():
            assert any(not sequence.finished for sequence in request.sequences)


def _unborn_choices(request: Request) -> Iterator[int]:
    """Indices of the choices that have no sequence yet: those before the fork."""
    if len(request.sequences) < request.params.num_sequences:
        born = {sequence.index for sequence in request.sequences}
        yield from (index for index in range(request.params.num_sequences) if index not in born)


def _needs_whole_prompt(sequence: Sequence) -> bool:
    """True when every prompt position has to be computed, so that no cached block may be used."""
    return sequence.request.params.needs_whole_prompt and sequence.num_output_tokens == 0
