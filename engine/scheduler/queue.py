"""The waiting queue and the order of sequences."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Literal

from octavo.engine.core.request import Sequence

# How often the head may be passed by sequences that fit while it does not, and how many are
# tried in one step. Passing keeps small prompts moving; the bound keeps the head from starving.
MAX_PASSES = 8
MAX_TRIED_PER_STEP = 4

OrderKey = tuple[int, int, int]
Order = Callable[[Sequence], OrderKey]


def fcfs_order(sequence: Sequence) -> OrderKey:
    """By arrival of the request, then choice. The first seq_id of a request tells its arrival."""
    return (0, sequence.request.sequences[0].seq_id, sequence.index)


def priority_order(sequence: Sequence) -> OrderKey:
    """By priority, lower first; then as `fcfs_order`."""
    request = sequence.request
    return (request.priority, request.sequences[0].seq_id, sequence.index)


ORDERS: dict[Literal["fcfs", "priority"], Order] = {
    "fcfs": fcfs_order,
    "priority": priority_order,
}


class OrderedSequences:
    """Sequences kept in one order; the last is the first to be preempted."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def last(self) -> Sequence:
        """The newest, or the one of lowest priority."""
        return self._items[-1]

    def snapshot(self) -> list[Sequence]:
        """All sequences, in order; not changed by later moves."""
        return self._items.copy()

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into its place, whatever it has been through before."""
        insort(self._items, sequence, key=self._order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be there."""
        position = bisect_left(self._items, self._order(sequence), key=self._order)
        assert self._items[position] is sequence, sequence.seq_id
        del self._items[position]

    def check_integrity(self) -> None:
        """Assert that the order holds."""
        keys = [self._order(sequence) for sequence in self._items]
        assert keys == sorted(set(keys))


class WaitingQueue(OrderedSequences):
    """Sequences that wait for blocks or for room in a step.

    A preempted sequence comes back to its old place, which is the front: all that still wait are
    newer or of lower priority.
    """

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._passes: dict[int, int] = {}

    @property
    def num_candidates(self) -> int:
        """How many may be tried now: the head, and the next ones that may still pass it."""
        if not self._items:
            return 0
        allowed = MAX_PASSES - self._passes.get(self._items[0].seq_id, 0)
        return min(len(self._items), 1 + min(allowed, MAX_TRIED_PER_STEP - 1))

    def candidate(self, position: int) -> Sequence:
        """The sequence at `position`; 0 is the head."""
        return self._items[position]

    def record_pass(self) -> None:
        """Note that a later sequence has been started while the head waits."""
        head = self._items[0]
        self._passes[head.seq_id] = self._passes.get(head.seq_id, 0) + 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be there."""
        super().remove(sequence)
        self._passes.pop(sequence.seq_id, None)
