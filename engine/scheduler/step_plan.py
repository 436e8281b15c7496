"""The step that is being put together."""

from octavo.engine.cache.block_table import Allocation
from octavo.engine.core.request import Sequence


class StepPlan:
    """What has been given to each sequence so far, and what is left.

    `budget` is the number of tokens still free in the step. `entries` maps seq_id to the
    sequence, its number of tokens and the change of its block table, in the order of computing.
    `num_owed_blocks` is what prompts that stay unfinished after this step will still need.
    `ahead` says that the step before is still running: nobody is preempted then, since results
    may give back what is missing, and `held_back` that somebody had to be left out for it.
    """

    __slots__ = ("ahead", "budget", "entries", "held_back", "num_owed_blocks", "preempted")

    def __init__(self, budget: int, ahead: bool = False) -> None:
        self.budget = budget
        self.ahead = ahead
        self.held_back = False
        self.entries: dict[int, tuple[Sequence, int, Allocation]] = {}
        self.num_owed_blocks = 0
        self.preempted = False

    def add(self, sequence: Sequence, num_tokens: int, allocation: Allocation) -> None:
        """Let the sequence compute its next `num_tokens` tokens."""
        self.entries[sequence.seq_id] = (sequence, num_tokens, allocation)
        self.budget -= num_tokens

    def drop(self, sequence: Sequence) -> tuple[tuple[int, int], ...]:
        """Take back what a sequence was given, since it is preempted.

        Returns its block copies, (source, destination), which will not be done.
        """
        self.preempted = True
        entry = self.entries.pop(sequence.seq_id, None)
        if entry is None:
            return ()
        self.budget += entry[1]
        return entry[2].block_copies


def chunk_size(num_wanted: int, budget: int, num_others: int, threshold: int) -> int:
    """How many of `num_wanted` tokens one sequence gets of what is left of the budget.

    What can be finished in this step is. A longer prompt gets at most half of the rest while
    `num_others` wait behind it, and leaves one token or more to each of them, so that a short
    newcomer starts at once. `threshold` caps a long prompt in any case; 0 is no cap.
    """
    cap = min(threshold, budget) if threshold else budget
    if num_wanted <= cap:
        return num_wanted
    if num_others:
        cap = min(cap, max(1, min((budget + 1) // 2, budget - num_others)))
    return cap
