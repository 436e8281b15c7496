"""Beam search over one request: which continuations survive, which texts are finished.

The rule is that of transformers' `generate(num_beams=W)`. After each step all continuations of all
W beams are ranked by the sum of their log-probabilities. Of the best (1 + number of end ids) x W,
at least 2 x W, so that W beams go on whatever ends:

- those that do not end go on, the best W of them;
- those that end become finished texts if they rank among the best W, with the score
  sum of log-probabilities / length ** length_penalty; the best W finished texts are kept.

The search is over when no beam is left, or when W texts are finished and `early_stopping` allows:
True at once; False when the best beam, if it ended now, would not beat the worst of them; "never"
when it would not at any length, so that only a text that cannot be found any more is given up.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from octavo.engine.core.model_output import BeamCandidate, TokenLogprobs
from octavo.engine.core.request import FinishReason, Request, Sequence
from octavo.engine.scheduler.outbox import EndRules


@dataclass(slots=True, eq=False)
class Beam:
    """A text that is being searched on. `logprob` is the sum over its generated ids.

    `candidates` are its continuations, once the step that computed its last token is over.
    """

    sequence: Sequence
    logprob: float = 0.0
    records: tuple[TokenLogprobs, ...] = ()
    candidates: SequenceOf[BeamCandidate] | None = None


class FinishedText(NamedTuple):
    """A text that ended, with the id that ended it. Ordered by score."""

    score: float
    logprob: float
    token_ids: tuple[int, ...]
    records: tuple[TokenLogprobs, ...]
    reason: FinishReason
    stop_reason: int | None


class Survivor(NamedTuple):
    """A continuation that goes on: `parent` and the next id."""

    parent: Beam
    token_id: int
    logprob: float
    records: tuple[TokenLogprobs, ...]


class BeamSearch:
    """The search of one request. `beams`, by seq_id, are ordered by their sums, best first.

    `prompt_logprobs` are kept for the delta of choice 0.
    """

    def __init__(self, request: Request, first: Sequence, ends: EndRules) -> None:
        params = request.params
        self.request = request
        self.width = params.beam_width
        self.beams = {first.seq_id: Beam(first)}
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._finished: list[FinishedText] = []
        self._params = params
        self._num_kept = ends.num_candidates(params)
        self._ends = ends

    @property
    def results(self) -> list[FinishedText]:
        """The best finished texts, best first; as many as the client wants, if there are."""
        return self._finished[: self._params.n]

    @property
    def trunk_length(self) -> int:
        """How many tokens all beams begin with."""
        texts = [list(beam.sequence.token_ids) for beam in self.beams.values()]
        low, high = min(texts), max(texts)
        pairs = enumerate(zip(low, high, strict=False))
        return next((place for place, (left, right) in pairs if left != right), len(low))

    def select(self) -> list[Survivor]:
        """Rank the candidates of all beams; returns those that go on, none when it is over."""
        ranked = [
            (beam.logprob + candidate.logprob, beam, candidate)
            for beam in self.beams.values()
            for candidate in beam.candidates or ()
        ]
        # The sort is stable: a tie goes to the better beam, and within it to the likelier id.
        ranked.sort(key=lambda item: -item[0])
        survivors: list[Survivor] = []
        ended: list[FinishedText] = []
        for place, (logprob, beam, candidate) in enumerate(ranked[: self._num_kept]):
            sequence = beam.sequence
            length = sequence.num_tokens + 1
            reason, stop_reason = self._ends.end_of_text(
                self._params, candidate.token_id, sequence.num_prompt_tokens, length
            )
            records = (
                beam.records if candidate.record is None else (*beam.records, candidate.record)
            )
            if reason is None:
                survivors.append(Survivor(beam, candidate.token_id, logprob, records))
            elif place < self.width:
                ids = (*sequence.token_ids[sequence.num_prompt_tokens :], candidate.token_id)
                score = self._score(logprob, len(ids))
                ended.append(FinishedText(score, logprob, ids, records, reason, stop_reason))
        self._finished += ended
        self._finished.sort(key=lambda text: -text.score)
        del self._finished[self.width :]
        del survivors[self.width :]
        return [] if self._is_over(survivors) else survivors

    def _is_over(self, survivors: SequenceOf[Survivor]) -> bool:
        if not survivors or len(self._finished) < self.width:
            return not survivors
        best = self._score(survivors[0].logprob, self._likely_length(survivors[0]))
        return self._params.early_stopping is True or best <= self._finished[-1].score

    def _likely_length(self, survivor: Survivor) -> int:
        """The length with which a survivor is compared with finished texts.

        Its sum only falls, and a penalty above 0 favours long texts: the longest is the bound then.
        """
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            return self._params.max_tokens
        return survivor.parent.sequence.num_output_tokens + 1

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)
