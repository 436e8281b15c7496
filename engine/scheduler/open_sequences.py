"""Where each open sequence stands, and that all it holds comes back when it leaves."""

from collections.abc import Sequence as SequenceOf

from octavo.engine.cache.kv_cache_manager import KVCacheManager
from octavo.engine.core.request import FinishReason, Request, Sequence, SequenceStatus
from octavo.engine.scheduler.batch import Batch
from octavo.engine.scheduler.queue import Order, OrderedSequences, WaitingQueue

_RUNNING = SequenceStatus.RUNNING


class OpenSequences:
    """Open requests with their sequences: each runs, waits in the queue, or is parked.

    A parked beam waits too, and another one of its group stands in the queue for it.
    `num_reserved_rows` are kept for beams to come.
    """

    def __init__(self, order: Order, kv_cache: KVCacheManager, max_num_seqs: int) -> None:
        self.requests: dict[str, Request] = {}
        self.by_id: dict[int, Sequence] = {}
        self.running = OrderedSequences(order)
        self.waiting = WaitingQueue(order)
        self.parked: dict[int, Sequence] = {}
        self.batch = Batch(kv_cache)
        self.num_reserved_rows = 0
        self._kv_cache = kv_cache
        self._max_num_seqs = max_num_seqs
        self._next_seq_id = 0
        self._next_number = 0

    @property
    def num_free_rows(self) -> int:
        """How many more sequences may run."""
        return self._max_num_seqs - len(self.running) - self.num_reserved_rows

    def add_request(self, request: Request) -> None:
        """Open a request and note its place in the order of arrival."""
        assert request.request_id not in self.requests, request.request_id
        request.number = self._next_number
        self._next_number += 1
        self.requests[request.request_id] = request

    def new_sequence(
        self, request: Request, index: int, token_ids: SequenceOf[int] | None = None
    ) -> Sequence:
        """Make a sequence over the prompt, or over all that a beam knows; it stands nowhere yet."""
        known = request.prompt_token_ids if token_ids is None else token_ids
        sequence = Sequence(self._next_seq_id, request, index, known)
        self._next_seq_id += 1
        request.sequences.append(sequence)
        self.by_id[sequence.seq_id] = sequence
        return sequence

    def run(self, sequence: Sequence) -> None:
        """Let a sequence that stands nowhere take part in steps."""
        sequence.run()
        self.running.add(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Take a running sequence and its row out of the steps; it stands nowhere then."""
        self.running.remove(sequence)
        self.batch.remove(sequence)

    def release(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | None = None
    ) -> None:
        """End a sequence and give back all that it holds."""
        if sequence.status is _RUNNING:
            self.stop(sequence)
        elif self.parked.pop(sequence.seq_id, None) is None:
            self.waiting.remove(sequence)
        sequence.finish(reason, stop_reason)
        sequence.request.sequences.remove(sequence)
        self._kv_cache.remove(sequence)
        del self.by_id[sequence.seq_id]

    def clear(self) -> None:
        """Forget all requests; their terminal deltas have been handed out."""
        for request in self.requests.values():
            request.open_choices.clear()
            request.sequences.clear()
        self.requests.clear()
        self.by_id.clear()
        self.running.clear()
        self.waiting.clear()
        self.parked.clear()
        self.batch.clear()
        self.num_reserved_rows = 0

    def close_choice(self, request: Request, index: int) -> None:
        """Note that the terminal delta of a choice has been handed out."""
        request.open_choices.remove(index)
        if request.finished:
            del self.requests[request.request_id]

    def check_integrity(self) -> None:
        """Assert that lists, statuses and rows agree; between steps only."""
        self._kv_cache.check_integrity()
        self.running.check_integrity()
        self.waiting.check_integrity()
        running, waiting = self.running.snapshot(), self.waiting.snapshot()
        assert self.num_free_rows >= 0
        assert all(sequence.status is _RUNNING for sequence in running)
        waiting += self.parked.values()
        assert all(
            sequence.status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED)
            for sequence in waiting
        )
        open_ids = {sequence.seq_id for sequence in running + waiting}
        assert open_ids == set(self.by_id) and len(open_ids) == len(running) + len(waiting)
        self.batch.check_integrity({sequence.seq_id for sequence in running})
        for request in self.requests.values():
            assert request.open_choices and request.sequences
            assert not any(sequence.finished for sequence in request.sequences)
