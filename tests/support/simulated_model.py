"""An executor without tensors: a deterministic model over a simulated KV cache.

Each slot of the cache stores a fingerprint of the whole history up to its token. Each step checks
that the slots of all tokens that count as computed hold the right fingerprints, so that a wrong
block table, a lost copy, a write into a shared block or a false cache hit fails at once. The next
token is a function of that history, the seed and the choice; so texts must not depend on company,
chunks, hits, forks or preemption.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.engine.core.model_output import BeamCandidate, ModelOutput, TokenLogprobs
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import NewSequence, ScheduledSequence, SchedulerOutput


def fingerprints(token_ids: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """One number per position that stands for all tokens up to it; `known` are the first ones."""
    result = list(known)
    for token_id in token_ids[len(result) :]:
        result.append(hash((result[-1] if result else 0, token_id)))
    return result


def next_token(fingerprint: int, stream: tuple[int, int], vocab_size: int) -> int:
    """The id that follows a history, drawn from `stream`."""
    return hash((fingerprint, stream)) % vocab_size


def stream_of(params: SamplingParams, seed: int, index: int) -> tuple[int, int]:
    """What the draws of a choice depend on, next to its history."""
    return (0, 0) if params.greedy else (seed, index)


def solo_text(
    prompt: Sequence[int], params: SamplingParams, index: int = 0, vocab_size: int = 1000
) -> list[int]:
    """The `max_tokens` ids that a choice generates undisturbed, with the seed of `params`."""
    ids, prints = list(prompt), fingerprints(prompt)
    for _ in range(params.max_tokens):
        stream = stream_of(params, params.seed or 0, index)
        ids.append(next_token(prints[-1], stream, vocab_size))
        prints = fingerprints(ids, prints)
    return ids[len(prompt) :]


def continuations(fingerprint: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """(id, log-probability) of the `count` likeliest ids after a history, best first."""
    found: dict[int, float] = {}
    number = 0
    while len(found) < count:
        number += 1
        token = hash((fingerprint, number)) % vocab_size
        found.setdefault(token, -0.3 * number - hash((fingerprint, token)) % 100 / 100)
    return sorted(found.items(), key=lambda item: -item[1])


def solo_beams(
    prompt: Sequence[int], params: SamplingParams, eos: Sequence[int], vocab_size: int = 1000
) -> list[tuple[list[int], float]]:
    """Texts and scores of an undisturbed beam search, best first."""
    width, eos = params.beam_width, () if params.ignore_eos else eos
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    while True:
        length = len(live[0][1]) + 1
        count = params.num_beam_candidates(eos)
        grown = [
            (total + value, [*text, token])
            for total, text in live
            for token, value in continuations(fingerprints([*prompt, *text])[-1], count, vocab_size)
        ]
        grown = sorted(grown, key=lambda item: -item[0])[:count]
        ends = [
            length == params.max_tokens or text[-1] in eos or text[-1] in params.stop_token_ids
            for _, text in grown
        ]
        live = [item for item, end in zip(grown, ends, strict=True) if not end][:width]
        penalty = length**params.length_penalty
        longest = params.max_tokens if params.early_stopping == "never" else length
        bound = max(penalty, longest**params.length_penalty)
        done += [
            (total / penalty, text)
            for (total, text), end in zip(grown[:width], ends, strict=False)
            if end
        ]
        done = sorted(done, key=lambda item: -item[0])[:width]
        over = len(done) == width and live and live[0][0] / bound <= done[-1][0]
        if not live or over or (len(done) == width and params.early_stopping is True):
            return [(text, score) for score, text in done[: params.n]]


@dataclass
class Row:
    """What the worker knows of one sequence; `prints` are the fingerprints of its tokens."""

    index: int
    seed: int
    params: SamplingParams
    token_ids: list[int]
    prints: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]


class SimulatedExecutor:
    """Carries out plans as a worker would, and asserts that they are right.

    A beam gets candidates instead of an id. A row that would draw `failing_token` fails instead.
    `error` is raised by the next step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        window: int | None = None,
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._window = window
        self.slots: dict[int, int] = {}
        self.host_slots: dict[int, int] = {}
        self.rows: dict[int, Row] = {}
        self.plans: list[SchedulerOutput] = []
        self.failing_token: int | None = None
        self.error: Exception | None = None
        self.is_shut_down = False

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def shutdown(self) -> None:
        assert not self.is_shut_down
        self.is_shut_down = True

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelOutput]:
        """Carry out a step, as a device would; its results are handed out later."""
        output = self.execute_model(plan)
        return lambda: output

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        if self.error is not None:
            raise self.error
        self.plans.append(plan)
        for seq_id in plan.removed_seq_ids:
            del self.rows[seq_id]
        for pairs in (plan.swap_out, plan.swap_in):
            assert len({destination for _, destination in pairs}) == len(pairs)
        self._transfer(plan.swap_out, self.slots, self.host_slots)
        self._transfer(plan.swap_in, self.host_slots, self.slots)
        self._copy_blocks(plan.block_copies)
        for new in plan.new_sequences:
            self._add_row(new)
        assert len(self.rows) <= self._max_num_seqs
        for item in plan.scheduled:
            self._update_row(item)
        for item in plan.scheduled:
            self._check_private(item)
            self._check_computed(self.rows[item.seq_id])
        return self._run(plan)

    def _add_row(self, new: NewSequence) -> None:
        assert new.seq_id not in self.rows
        self.rows[new.seq_id] = Row(
            index=new.index,
            seed=new.seed,
            params=new.params,
            token_ids=list(new.token_ids),
            prints=fingerprints(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            block_ids=list(new.block_ids),
        )

    def _transfer(
        self, pairs: Sequence[tuple[int, int]], source: dict[int, int], target: dict[int, int]
    ) -> None:
        size = self._block_size
        for origin, destination in pairs:
            for row in range(size):
                target.pop(destination * size + row, None)
                if (value := source.get(origin * size + row)) is not None:
                    target[destination * size + row] = value

    def _copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert len({destination for _, destination in pairs}) == len(pairs)
        for number, (source, _) in enumerate(pairs):
            assert source not in [destination for _, destination in pairs[:number]]
        size = self._block_size
        read = [[self.slots.get(source * size + row) for row in range(size)] for source, _ in pairs]
        for (_, destination), values in zip(pairs, read, strict=True):
            for row, value in enumerate(values):
                if value is not None:
                    self.slots[destination * size + row] = value

    def _update_row(self, item: ScheduledSequence) -> None:
        row = self.rows[item.seq_id]
        if item.new_token_ids:
            row.token_ids.extend(item.new_token_ids)
            row.prints = fingerprints(row.token_ids, row.prints)
        table = row.block_ids
        if item.new_block_ids:
            assert item.block_offset <= len(table)
            table[item.block_offset :] = item.new_block_ids
        seen = self._seen_blocks(row)
        assert len(set(seen)) == len(seen)
        assert all(0 <= block_id < self._num_blocks for block_id in seen)

    def _first_seen(self, row: Row) -> int:
        """The first position that tokens still to be computed can see."""
        return max(0, row.num_computed_tokens - self._window + 1) if self._window else 0

    def _seen_blocks(self, row: Row) -> list[int]:
        return row.block_ids[self._first_seen(row) // self._block_size :]

    def _check_private(self, item: ScheduledSequence) -> None:
        row = self.rows[item.seq_id]
        first = row.num_computed_tokens // self._block_size
        last = (row.num_computed_tokens + item.num_tokens - 1) // self._block_size
        for block_id in row.block_ids[first : last + 1]:
            holders = [
                seq for seq, other in self.rows.items() if block_id in self._seen_blocks(other)
            ]
            assert holders == [item.seq_id], f"block {block_id} is written but shared"
        assert last < len(row.block_ids)

    def _check_computed(self, row: Row) -> None:
        for position in range(self._first_seen(row), row.num_computed_tokens):
            assert self.slots.get(self._slot(row, position)) == row.prints[position]

    def _run(self, plan: SchedulerOutput) -> ModelOutput:
        sampled: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        failed: dict[int, str] = {}
        candidates: dict[int, tuple[BeamCandidate, ...]] = {}
        for item in plan.scheduled:
            row = self.rows[item.seq_id]
            start = row.num_computed_tokens
            end = start + item.num_tokens
            assert item.num_tokens > 0 and end <= len(row.token_ids)
            for position in range(start, end):
                self.slots[self._slot(row, position)] = row.prints[position]
            row.num_computed_tokens = end
            if row.params.prompt_logprobs is not None and start < row.num_prompt_tokens - 1:
                scored = row.token_ids[start + 1 : min(end + 1, row.num_prompt_tokens)]
                prompt_logprobs[item.seq_id] = tuple([_logprobs(token) for token in scored])
            assert item.sample == (end == len(row.token_ids))
            if item.sample and row.params.use_beam_search:
                self._continue(row, item.seq_id, candidates, failed)
            elif item.sample:
                self._sample(row, item, sampled, failed)
        for seq_id, ids in sampled.items():
            logprobs[seq_id] = tuple([_logprobs(token) for token in ids])
        return ModelOutput(sampled, logprobs, prompt_logprobs, failed, candidates=candidates)

    def _continue(
        self,
        row: Row,
        seq_id: int,
        candidates: dict[int, tuple[BeamCandidate, ...]],
        failed: dict[int, str],
    ) -> None:
        fingerprint = self.slots[self._slot(row, row.num_computed_tokens - 1)]
        count = row.params.num_beam_candidates(self._eos_token_ids)
        found = continuations(fingerprint, count, self._vocab_size)
        if found[0][0] == self.failing_token:
            failed[seq_id] = "NaN logits"
        else:
            candidates[seq_id] = tuple(
                [BeamCandidate(token, value, _logprobs(token)) for token, value in found]
            )

    def _sample(
        self,
        row: Row,
        item: ScheduledSequence,
        sampled: dict[int, tuple[int, ...]],
        failed: dict[int, str],
    ) -> None:
        streams = [(item.seq_id, row.index)] + [(fork.seq_id, fork.index) for fork in item.forks]
        for seq_id, index in streams:
            # Read from the cache, as attention would, so that a wrong table changes the text.
            fingerprint = self.slots[self._slot(row, row.num_computed_tokens - 1)]
            stream = stream_of(row.params, row.seed, index)
            token = next_token(fingerprint, stream, self._vocab_size)
            if token == self.failing_token:
                failed[seq_id] = "NaN logits"
            else:
                sampled[seq_id] = (token,)
            if seq_id == item.seq_id:
                # A failed row goes on with whatever it drew, until the scheduler ends it.
                row.token_ids.append(token)
        row.prints = fingerprints(row.token_ids, row.prints)

    def _slot(self, row: Row, position: int) -> int:
        block_id = row.block_ids[position // self._block_size]
        return block_id * self._block_size + position % self._block_size


def _logprobs(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, ())
