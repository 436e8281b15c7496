"""The beams of a request as sequences: they fork, are dropped, and stop and go on together."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from octavo.engine.cache.kv_cache_manager import KVCacheManager
from octavo.engine.core.errors import InvalidRequestError
from octavo.engine.core.model_output import BeamCandidate
from octavo.engine.core.request import FinishReason, Request, Sequence, SequenceStatus
from octavo.engine.core.request_output import SequenceDelta
from octavo.engine.scheduler.beam import Beam, BeamSearch, FinishedText, Survivor
from octavo.engine.scheduler.open_sequences import OpenSequences
from octavo.engine.scheduler.outbox import EndRules, Outbox

_RUNNING, _SWAPPED = SequenceStatus.RUNNING, SequenceStatus.SWAPPED


class BeamGroups:
    """All open beam searches.

    A search begins as one sequence that computes the prompt, and holds as many rows as it has
    beams from then on. Each beam that has computed its last token waits for the others; then the
    survivors are chosen. A survivor that is its parent's first goes on in the parent's blocks, the
    others fork them.

    Preempted beams resume as a group. One of them, the leader, stands in the queue for all; the
    others are parked. After a recomputation the leader first computes the trunk, the tokens that
    all beams begin with, and the parked ones fork it: so the prompt is neither computed nor held
    once per beam, with or without a prefix cache.
    """

    def __init__(
        self, kv_cache: KVCacheManager, open_sequences: OpenSequences, outbox: Outbox
    ) -> None:
        self._kv_cache = kv_cache
        self._open = open_sequences
        self._outbox = outbox
        self._searches: dict[str, BeamSearch] = {}
        # Length of the trunk that a leader has to compute for its parked beams.
        self._trunks: dict[int, int] = {}

    # How the scheduler sees a sequence that may be a beam.

    def num_rows(self, sequence: Sequence) -> int:
        """Rows that have to be free for a waiting sequence to start."""
        search = self._searches.get(sequence.request.request_id)
        return 1 if search is None else search.width

    def target(self, sequence: Sequence) -> int:
        """How many tokens a sequence computes before anything else has to happen."""
        return self._trunks.get(sequence.seq_id, sequence.num_tokens)

    def num_parked_blocks(self, sequence: Sequence) -> int:
        """Blocks that the parked beams will need when `sequence` has computed their trunk."""
        trunk = self._trunks.get(sequence.seq_id)
        if trunk is None:
            return 0
        num_shared = trunk // self._kv_cache.block_size
        return sum(
            self._kv_cache.blocks_for(member.num_tokens) - num_shared
            for member in sequence.request.sequences
        ) - (self._kv_cache.blocks_for(trunk) - num_shared)

    def members(self, sequence: Sequence) -> list[Sequence]:
        """The running sequences that are preempted with `sequence`, in order of their index."""
        if sequence.request.request_id not in self._searches:
            return [sequence]
        running = [member for member in sequence.request.sequences if member.status is _RUNNING]
        return sorted(running, key=lambda member: member.index)

    def swapped_members(self, leader: Sequence) -> list[Sequence]:
        """The swapped sequences that come back with `leader`, itself included and first."""
        parked = [
            member
            for member in leader.request.sequences
            if member.seq_id in self._open.parked and member.status is _SWAPPED
        ]
        return [leader, *parked]

    # A search begins and goes on.

    def begin(self, request: Request, first: Sequence, ends: EndRules) -> None:
        """Open the search of a request."""
        self._searches[request.request_id] = BeamSearch(request, first, ends)

    def collect(self, sequence: Sequence, candidates: SequenceOf[BeamCandidate]) -> None:
        """Take in a beam's continuations; the search goes on once all beams have theirs."""
        search = self._searches[sequence.request.request_id]
        search.beams[sequence.seq_id].candidates = candidates
        scored = self._outbox.take_prompt_logprobs(sequence.seq_id)
        search.prompt_logprobs = scored if scored is not None else search.prompt_logprobs
        if search.request.params.max_tokens == 0:
            nothing = FinishedText(0.0, 0.0, (), (), FinishReason.LENGTH, None)
            self._finish(search, [nothing] * search.request.params.n)
        elif all(beam.candidates is not None for beam in search.beams.values()):
            survivors = search.select()
            if survivors:
                self._go_on(search, survivors)
            else:
                self._finish(search, search.results)
        self.reserve_rows()

    def reserve_rows(self) -> None:
        """Keep rows for the beams that running searches do not have yet."""
        reserved = 0
        for search in self._searches.values():
            running = self.members(next(iter(search.beams.values())).sequence)
            reserved += search.width - len(running) if running else 0
        self._open.num_reserved_rows = reserved

    def drop(self, request: Request) -> None:
        """End the beams of a request whose terminal deltas have been handed out."""
        search = self._searches.pop(request.request_id)
        self._release(beam.sequence for beam in search.beams.values())
        self.reserve_rows()

    def _go_on(self, search: BeamSearch, survivors: SequenceOf[Survivor]) -> None:
        kept = {survivor.parent.sequence.seq_id for survivor in survivors}
        self._release(beam.sequence for seq_id, beam in search.beams.items() if seq_id not in kept)
        taken = {member.index for member in search.request.sequences}
        free_indices = [index for index in range(search.width) if index not in taken]
        sequences: list[Sequence] = []
        for survivor in survivors:
            parent = survivor.parent.sequence
            if parent.seq_id in kept:
                kept.remove(parent.seq_id)
                sequences.append(parent)
            else:
                sequences.append(self._fork(parent, free_indices.pop(0)))
        for sequence, survivor in zip(sequences, survivors, strict=True):
            sequence.append_tokens((survivor.token_id,))
            self._open.batch.send_tokens(sequence, (survivor.token_id,))
        search.beams = {
            sequence.seq_id: Beam(sequence, survivor.logprob, survivor.records)
            for sequence, survivor in zip(sequences, survivors, strict=True)
        }

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        child = self._open.new_sequence(parent.request, index, parent.token_ids)
        child.num_cached_tokens = parent.num_cached_tokens
        self._share(parent, child)
        return child

    def _share(self, parent: Sequence, child: Sequence) -> None:
        self._kv_cache.fork(parent, child)
        self._open.run(child)
        child.advance(parent.num_computed_tokens)

    def _finish(self, search: BeamSearch, results: SequenceOf[FinishedText]) -> None:
        request = search.request
        cached = max(beam.sequence.num_cached_tokens for beam in search.beams.values())
        for index in sorted(request.open_choices):
            if index < len(results):
                self._put_result(search, index, results[index], cached)
            else:
                self._put_missing(search, index, len(results), cached)
            self._open.close_choice(request, index)
        self.drop(request)

    def _put_missing(
        self, search: BeamSearch, index: int, num_results: int, num_cached_tokens: int
    ) -> None:
        """The request's own masks ended all beams before there were enough texts."""
        params = search.request.params
        message = (
            f"{params.n} texts are asked for, but the token ids that are left allow only "
            f"{num_results}"
        )
        self._outbox.deltas.append(
            SequenceDelta(
                request_id=search.request.request_id,
                index=index,
                token_ids=(),
                finish_reason=FinishReason.ERROR,
                error=message,
                num_cached_tokens=num_cached_tokens,
                scheduled_time=search.request.scheduled_time,
                refusal=InvalidRequestError(
                    message, "bad_words" if params.bad_words_token_ids else "n"
                ),
            )
        )

    def _put_result(
        self, search: BeamSearch, index: int, text: FinishedText, num_cached_tokens: int
    ) -> None:
        self._outbox.deltas.append(
            SequenceDelta(
                request_id=search.request.request_id,
                index=index,
                token_ids=text.token_ids,
                logprobs=text.records,
                prompt_logprobs=search.prompt_logprobs if index == 0 else None,
                finish_reason=text.reason,
                stop_reason=text.stop_reason,
                num_cached_tokens=num_cached_tokens,
                scheduled_time=search.request.scheduled_time,
                cumulative_logprob=text.logprob,
                score=text.score,
            )
        )

    def _release(self, sequences: Iterable[Sequence]) -> None:
        for sequence in list(sequences):
            self._trunks.pop(sequence.seq_id, None)
            self._outbox.prompt_logprobs.pop(sequence.seq_id, None)
            self._open.release(sequence, FinishReason.STOP)

    # Beams stop and resume together.

    def suspend(self, members: SequenceOf[Sequence]) -> Sequence:
        """Park what was preempted together, but for the one returned: it waits for all.

        `members` have their new status already.
        """
        leader, *others = members
        search = self._searches.get(leader.request.request_id)
        if search is None:
            return leader
        for other in others:
            self._open.parked[other.seq_id] = other
        if leader.status is not _SWAPPED:
            for beam in search.beams.values():
                beam.candidates = None
                if beam.sequence is not leader:
                    self._kv_cache.remove(beam.sequence)
            if len(search.beams) > 1:
                self._trunks[leader.seq_id] = search.trunk_length
        self.reserve_rows()
        return leader

    def grow_trunk(self, sequence: Sequence) -> None:
        """Fork the parked beams once `sequence` has computed what all of them begin with."""
        if self._trunks.get(sequence.seq_id) != sequence.num_computed_tokens:
            return
        del self._trunks[sequence.seq_id]
        parked = [m for m in sequence.request.sequences if m.seq_id in self._open.parked]
        for member in parked:
            del self._open.parked[member.seq_id]
            self._share(sequence, member)
        self.reserve_rows()

    def clear(self) -> None:
        """Forget all searches; their sequences have been forgotten too."""
        self._searches.clear()
        self._trunks.clear()

    def check_integrity(self) -> None:
        """Assert that searches, sequences and parked ones agree; between steps only."""
        beams = {
            seq_id: beam.sequence
            for search in self._searches.values()
            for seq_id, beam in search.beams.items()
        }
        assert self._open.parked.keys() <= beams.keys() and self._trunks.keys() <= beams.keys()
        for request in self._open.requests.values():
            if request.params.use_beam_search:
                own = {member.seq_id for member in request.sequences}
                assert own == set(self._searches[request.request_id].beams)
        assert self._searches.keys() <= self._open.requests.keys()
        for seq_id, trunk in self._trunks.items():
            assert beams[seq_id].num_computed_tokens < trunk < beams[seq_id].num_tokens
