"""The waiting queue and the order of sequences."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Literal

from octavo.engine.core.request import Sequence

# How often a sequence that does not fit may be passed by later ones that do. Passing keeps small
# prompts moving; the bound keeps it from starving.
MAX_PASSES = 8

OrderKey = tuple[int, int, int]
Order = Callable[[Sequence], OrderKey]


def fcfs_order(sequence: Sequence) -> OrderKey:
    """By arrival of the request, then choice."""
    return (0, sequence.request.number, sequence.index)


def priority_order(sequence: Sequence) -> OrderKey:
    """By priority, lower first; then as `fcfs_order`."""
    request = sequence.request
    return (request.priority, request.number, sequence.index)


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

    def clear(self) -> None:
        """Take all out."""
        self._items.clear()

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

    def may_be_passed(self, sequence: Sequence) -> bool:
        """True while later ones may start before `sequence`, which does not fit now."""
        return self._passes.get(sequence.seq_id, 0) < MAX_PASSES

    def record_pass(self, sequence: Sequence) -> None:
        """Note that a later sequence has been started while `sequence` does not fit."""
        self._passes[sequence.seq_id] = self._passes.get(sequence.seq_id, 0) + 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be there."""
        super().remove(sequence)
        self._passes.pop(sequence.seq_id, None)

    def clear(self) -> None:
        """Take all out."""
        super().clear()
        self._passes.clear()
