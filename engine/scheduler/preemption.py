"""How running sequences give way: by recomputation or by swapping."""

from collections.abc import Sequence as SequenceOf

from octavo.config.scheduler import SchedulerConfig
from octavo.engine.cache.kv_cache_manager import KVCacheManager
from octavo.engine.core.limits import PreemptionCosts
from octavo.engine.core.request import Sequence
from octavo.engine.scheduler.admission import needs_whole_prompt
from octavo.engine.scheduler.beam_groups import BeamGroups
from octavo.engine.scheduler.open_sequences import OpenSequences
from octavo.engine.scheduler.outbox import Outbox
from octavo.engine.scheduler.step_plan import StepPlan


class Preemption:
    """Takes the blocks of a sequence, or of all beams of a search, and queues it again.

    `auto` compares what was measured: tokens to compute again x time per token against blocks to
    copy, there and back, x time per block. Without room in host memory it is recomputation.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        costs: PreemptionCosts | None,
        kv_cache: KVCacheManager,
        open_sequences: OpenSequences,
        beams: BeamGroups,
        outbox: Outbox,
    ) -> None:
        self._mode = config.preemption_mode
        self._costs = costs
        self._kv_cache = kv_cache
        self._open = open_sequences
        self._beams = beams
        self._outbox = outbox
        self.num_recomputed = 0
        self.num_swapped = 0

    def preempt(self, plan: StepPlan, victim: Sequence) -> None:
        """Let a running sequence give way, with those that may run only together with it."""
        members = self._beams.members(victim)
        copies = {
            destination: source for member in members for source, destination in plan.drop(member)
        }
        swaps = self._should_swap(members) and self._kv_cache.swap_out(members, copies)
        for member in members:
            self._open.stop(member)
            if swaps:
                member.swap_out()
            else:
                self._kv_cache.free(member)
                self._outbox.prompt_logprobs.pop(member.seq_id, None)
                member.preempt()
        self._open.waiting.add(self._beams.suspend(members))
        if swaps:
            self.num_swapped += len(members)
        else:
            self.num_recomputed += len(members)

    def _should_swap(self, members: SequenceOf[Sequence]) -> bool:
        # What the worker gathers from a whole prompt is lost with its row.
        if self._mode == "recompute" or any(needs_whole_prompt(member) for member in members):
            return False
        if self._mode == "swap":
            return True
        if self._costs is None:
            return False
        recompute = self._kv_cache.num_distinct_tokens(members) * self._costs.compute_token
        swap = 2 * self._kv_cache.num_blocks_to_save(members) * self._costs.copy_block
        return swap < recompute
