"""Decides what each step computes, and what its results mean for the sequences."""

import logging
from collections.abc import Sequence as SequenceOf

from octavo.config.scheduler import SchedulerConfig
from octavo.engine.cache.kv_cache_manager import KVCacheManager
from octavo.engine.core.block_map import BlockMap
from octavo.engine.core.limits import EngineLimits
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.request import FinishReason, Request, Sequence, SequenceStatus
from octavo.engine.core.request_output import EngineStats, SequenceDelta
from octavo.engine.core.scheduler_output import Fork, SchedulerOutput
from octavo.engine.scheduler.admission import Admission
from octavo.engine.scheduler.beam_groups import BeamGroups
from octavo.engine.scheduler.lookahead import Lookahead
from octavo.engine.scheduler.open_sequences import OpenSequences
from octavo.engine.scheduler.outbox import EndRules, Outbox
from octavo.engine.scheduler.preemption import Preemption
from octavo.engine.scheduler.queue import ORDERS
from octavo.engine.scheduler.step_plan import StepPlan, chunk_size

# Looking up a member of an enum costs more than the rest of the test in which this stands.
_RUNNING = SequenceStatus.RUNNING

_logger = logging.getLogger(__name__)


class Scheduler:
    """One mechanism: a step lets `num_computed_tokens` of each sequence catch up with its tokens.

    Prefill, chunks, prefix hits, resume after preemption and decode are all this. Called from the
    engine thread only; `schedule` and `update_from_output` alternate, all else happens between
    steps. Between the two `schedule_ahead` may plan the step after.
    """

    def __init__(
        self, config: SchedulerConfig, limits: EngineLimits, kv_cache: KVCacheManager
    ) -> None:
        self._limits = limits
        self._kv_cache = kv_cache
        self._chunk_threshold = config.long_prefill_token_threshold
        self._ends = EndRules(limits)
        self._outbox = Outbox()
        order = ORDERS[config.scheduling_policy]
        self._open = OpenSequences(order, kv_cache, limits.max_num_seqs)
        self._beams = BeamGroups(kv_cache, self._open, self._outbox)
        self._admission = Admission(config, limits, kv_cache, self._open, self._beams, self._outbox)
        self._preemption = Preemption(
            config, limits.host_memory.costs, kv_cache, self._open, self._beams, self._outbox
        )
        self._lookahead = Lookahead(self._open, limits.max_model_len)
        # The step that runs while the results of the one before are taken in.
        self._ahead: SchedulerOutput | None = None
        # Choices that will draw their first token from the row of this step, by their parent.
        self._children: dict[int, list[Sequence]] = {}
        self._num_steps = 0
        self._last_step_tokens = 0
        self._num_integrity_errors = 0

    # Requests come and go, between steps.

    def add_request(self, request: Request) -> None:
        """Queue a request. It must fit the limits, and its id must not be open."""
        self._open.add_request(request)
        self._lookahead.note(request)
        first = self._open.new_sequence(request, index=0)
        if request.params.use_beam_search:
            self._beams.begin(request, first, self._ends)
        self._open.waiting.add(first)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End all choices of a request, or one; unknown or finished ones are left alone."""
        request = self._open.requests.get(request_id)
        if request is None:
            return
        chosen = request.open_choices if index is None else request.open_choices & {index}
        self._end_choices(request, sorted(chosen), FinishReason.ABORT)
        if not request.sequences and request.open_choices:
            # The one sequence that computed the prompt is gone before the fork: the next choice
            # takes its part, and finds what was computed in the prefix cache.
            first = min(request.open_choices)
            self._open.waiting.add(self._open.new_sequence(request, first))

    def has_request(self, request_id: str) -> bool:
        """True while a choice of the request is open."""
        return request_id in self._open.requests

    @property
    def has_requests(self) -> bool:
        """True while a request is open, so that `schedule` has something to plan."""
        return bool(self._open.requests)

    @property
    def has_work(self) -> bool:
        """True when a step has something to compute or to hand out."""
        return bool(self._open.requests or self._outbox.deltas)

    # First half of a step.

    def schedule(self) -> SchedulerOutput:
        """Plan one step: running decodes, running prefills, then the waiting queue.

        There must be an open request.
        """
        plan = StepPlan(self._limits.max_num_batched_tokens)
        self._lookahead.begin()
        self._fill(plan)
        assert plan.entries, "open requests, and none can go on"
        return self._open.batch.make_output(plan, self._plan_forks)

    def schedule_ahead(self, running: SchedulerOutput) -> SchedulerOutput | None:
        """Plan the step after `running`, whose results are not known yet.

        Each of its sequences is taken to go on. One that ends instead computes a row for nothing,
        which `update_from_output` passes over. None where the results have to be waited for.
        """
        self._ahead = None
        if not self._lookahead.is_possible:
            return None
        self._lookahead.assume(running)
        plan = StepPlan(self._limits.max_num_batched_tokens, ahead=True)
        self._fill(plan)
        self._lookahead.held_back = plan.held_back
        if plan.entries:
            self._ahead = self._open.batch.make_output(plan, self._plan_forks)
        return self._ahead

    def _fill(self, plan: StepPlan) -> None:
        self._schedule_running(plan)
        if not (plan.preempted or plan.held_back):
            self._admission.admit(plan)

    def _schedule_running(self, plan: StepPlan) -> None:
        prefills = []
        for sequence in self._open.running.snapshot():
            num_wanted = sequence.num_tokens - sequence.num_computed_tokens
            if num_wanted > 1:
                prefills.append(sequence)
            elif num_wanted == 1 and sequence.status is _RUNNING:  # a beam may want nothing
                self._schedule_next(plan, sequence, 1)
        for position, sequence in enumerate(prefills):
            if plan.budget == 0:
                break
            if sequence.status is _RUNNING:
                num_others = len(prefills) - 1 - position + self._admission.is_possible
                num_wanted = self._beams.target(sequence) - sequence.num_computed_tokens
                num_tokens = chunk_size(num_wanted, plan.budget, num_others, self._chunk_threshold)
                self._schedule_next(plan, sequence, num_tokens)
            if sequence.status is _RUNNING:
                plan.num_owed_blocks += self._kv_cache.num_missing_blocks(sequence)
                plan.num_owed_blocks += self._beams.num_parked_blocks(sequence)

    def _schedule_next(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> None:
        allocation = self._kv_cache.allocate_slots(sequence, num_tokens)
        while allocation is None:
            if plan.ahead:
                plan.held_back = True
                return
            self._preemption.preempt(plan, self._open.running.last)
            if sequence.status is not _RUNNING:
                return
            allocation = self._kv_cache.allocate_slots(sequence, num_tokens)
        plan.add(sequence, num_tokens, allocation)

    def _plan_forks(self, parent: Sequence) -> tuple[Fork, ...]:
        request = parent.request
        children = [self._open.new_sequence(request, index) for index in request.unborn_choices]
        if children:
            self._children[parent.seq_id] = children
        return tuple([Fork(child.seq_id, child.index) for child in children])

    # Second half of a step.

    def update_from_output(self, plan: SchedulerOutput, output: ModelOutput) -> list[SequenceDelta]:
        """Take in the results of a step; return all deltas since the last call."""
        self._num_steps += 1
        self._last_step_tokens = sum([item.num_tokens for item in plan.scheduled])
        by_id, candidates = self._open.by_id, output.candidates
        assumed = self._lookahead.has_assumed(plan)
        for item in plan.scheduled:
            sequence = by_id.get(item.seq_id)
            # A beam that ended with another one of its group, or what ended a step ago.
            if sequence is None:
                continue
            failure = output.failed.get(item.seq_id) if output.failed else None
            if not assumed:
                sequence.advance(item.num_tokens)
            if failure is None:
                self._note_computed(sequence, item.num_tokens, output)
            if item.forks:
                self._place_children(sequence)
            if failure is not None:
                self._fail(sequence, failure, item.forks)
            elif item.seq_id in candidates:
                self._beams.collect(sequence, candidates[item.seq_id])
            elif item.sample:
                self._accept(sequence, output)
                for fork in item.forks:
                    self._accept_child(by_id[fork.seq_id], output)
        return self._outbox.take_deltas()

    def take_deltas(self) -> list[SequenceDelta]:
        """All deltas since the last call."""
        return self._outbox.take_deltas()

    def take_started(self) -> list[Request]:
        """Open requests that have begun to run since the last call."""
        return [request for request in self._outbox.take_started() if not request.finished]

    def fail_all(self, reason: str) -> None:
        """End every request with an error and take back all that is held.

        For a step that failed half way: nothing of its state is relied on.
        """
        for request in self._open.requests.values():
            for index in sorted(request.open_choices):
                self._outbox.put_end(request, index, FinishReason.ERROR, error=reason)
        self._ahead = None
        self._open.clear()
        self._beams.clear()
        self._kv_cache.clear()
        self._children.clear()
        self._outbox.prompt_logprobs.clear()

    def verify(self) -> None:
        """Count a contradiction in the bookkeeping instead of failing; between steps only."""
        try:
            self.check_integrity()
        except AssertionError:
            _logger.exception("the bookkeeping of the cache contradicts itself")
            self._num_integrity_errors += 1

    def _note_computed(self, sequence: Sequence, num_tokens: int, output: ModelOutput) -> None:
        if sequence.num_computed_tokens % self._kv_cache.block_size < num_tokens:
            self._kv_cache.cache_full_blocks(sequence)
            self._kv_cache.free_outside_window(sequence)
        if self._open.parked:
            self._beams.grow_trunk(sequence)
        if self._outbox.prompt_logprobs:
            buffer = self._outbox.prompt_logprobs.get(sequence.seq_id, [])
            buffer.extend(output.prompt_logprobs.get(sequence.seq_id, ()))

    def _accept(self, sequence: Sequence, output: ModelOutput) -> None:
        """Append the sampled id, decide whether the text ends, and hand it out."""
        seq_id, request, outbox = sequence.seq_id, sequence.request, self._outbox
        scored = outbox.take_prompt_logprobs(seq_id) if outbox.prompt_logprobs else None
        if request.params.max_tokens == 0:
            outbox.put_end(
                request,
                sequence.index,
                FinishReason.LENGTH,
                num_cached_tokens=sequence.num_cached_tokens,
                prompt_logprobs=scored,
                embedding=output.embeddings.get(seq_id),
            )
            self._close(sequence, FinishReason.LENGTH)
            return
        token_ids = output.sampled[seq_id]
        sequence.append_tokens(token_ids)
        reason, stop_reason = self._ends.end_of_text(
            request.params, token_ids[-1], sequence.num_prompt_tokens, sequence.num_tokens
        )
        outbox.deltas.append(
            SequenceDelta(
                request.request_id,
                sequence.index,
                token_ids,
                output.logprobs.get(seq_id, ()),
                scored,
                reason,
                stop_reason,
                None,
                sequence.num_cached_tokens,
                request.scheduled_time,
            )
        )
        if reason is not None:
            self._close(sequence, reason, stop_reason)

    def _place_children(self, parent: Sequence) -> None:
        """Let the children share the parent's blocks, or wait where no row is free."""
        for child in self._children.pop(parent.seq_id):
            child.num_cached_tokens = parent.num_cached_tokens
            if self._open.num_free_rows > 0:
                self._kv_cache.fork(parent, child)
                self._open.run(child)
                child.advance(parent.num_computed_tokens)
            else:
                self._open.waiting.add(child)

    def _accept_child(self, child: Sequence, output: ModelOutput) -> None:
        failure = output.failed.get(child.seq_id)
        if failure is None:
            self._accept(child, output)
        else:
            self._end_choices(child.request, [child.index], FinishReason.ERROR, failure)

    def _fail(self, sequence: Sequence, reason: str, forks: SequenceOf[Fork]) -> None:
        """End a sequence whose row could not be used, and the choices that hang on that row."""
        request = sequence.request
        if request.params.use_beam_search:
            indices = request.open_choices
        else:
            indices = {sequence.index, *(fork.index for fork in forks), *request.unborn_choices}
        self._end_choices(request, sorted(indices), FinishReason.ERROR, reason)

    def _end_choices(
        self,
        request: Request,
        indices: SequenceOf[int],
        reason: FinishReason,
        error: str | None = None,
    ) -> None:
        """End choices without a new id, those too that never got as far as the fork."""
        beams = request.params.use_beam_search
        born = {} if beams else {sequence.index: sequence for sequence in request.sequences}
        for index in indices:
            sequence = born.get(index)
            num_cached_tokens = 0 if sequence is None else sequence.num_cached_tokens
            self._outbox.put_end(
                request, index, reason, num_cached_tokens=num_cached_tokens, error=error
            )
            if sequence is None:
                self._open.close_choice(request, index)
            else:
                self._close(sequence, reason)
        if beams and request.finished:
            self._beams.drop(request)

    def _close(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | None = None
    ) -> None:
        """Give back all that a sequence holds; its terminal delta has been handed out."""
        self._outbox.prompt_logprobs.pop(sequence.seq_id, None)
        self._open.release(sequence, reason, stop_reason)
        self._open.close_choice(sequence.request, sequence.index)

    # What others may look at.

    def stats(self) -> EngineStats:
        """Counters and gauges; running and waiting count requests, not choices."""
        sequences = self._open.running.snapshot()
        running = {sequence.request.number for sequence in sequences}
        return EngineStats(
            num_running=len(running),
            num_waiting=len(self._open.requests) - len(running),
            num_blocks=self._kv_cache.num_blocks,
            num_used_blocks=self._kv_cache.num_used_blocks,
            block_size=self._kv_cache.block_size,
            num_wasted_slots=self._kv_cache.num_wasted_slots(self._held()),
            num_preemptions=self._preemption.num_recomputed + self._preemption.num_swapped,
            num_preemptions_by_swap=self._preemption.num_swapped,
            num_swap_blocks=self._kv_cache.swap_space.num_blocks,
            num_used_swap_blocks=self._kv_cache.swap_space.num_used_blocks,
            num_swapped_out_blocks=self._kv_cache.num_swapped_out,
            num_swapped_in_blocks=self._kv_cache.num_swapped_in,
            num_offload_blocks=self._kv_cache.offload_cache.num_blocks,
            num_used_offload_blocks=len(self._kv_cache.offload_cache),
            num_offload_hits=self._kv_cache.num_offload_hits,
            prefix_cache_queries=self._admission.num_cache_queries,
            prefix_cache_hits=self._admission.num_cache_hits,
            num_steps=self._num_steps,
            num_integrity_errors=self._num_integrity_errors,
            last_step_tokens=self._last_step_tokens,
        )

    def block_map(self) -> BlockMap:
        """A picture of the block pool."""
        held = self._held()
        return BlockMap(
            self._kv_cache.block_size,
            self._kv_cache.describe_blocks(held),
            self._kv_cache.num_wasted_slots(held),
        )

    def _held(self) -> list[tuple[Sequence, int]]:
        """Sequences that hold blocks, with their tokens; those count that a step writes just now.

        Their slots are no waste: they were taken for this one step.
        """
        running = self._open.running.snapshot()
        if self._ahead is None:
            return [(sequence, sequence.num_computed_tokens) for sequence in running]
        written = {item.seq_id: item.num_tokens for item in self._ahead.scheduled}
        return [(item, item.num_computed_tokens + written.get(item.seq_id, 0)) for item in running]

    def check_integrity(self) -> None:
        """Assert that queue, running sequences, requests and blocks agree; between steps only."""
        self._open.check_integrity()
        self._beams.check_integrity()
        assert not self._children
        assert self._outbox.prompt_logprobs.keys() <= {
            seq_id for seq_id, item in self._open.by_id.items() if item.status is _RUNNING
        }
