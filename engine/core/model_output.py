"""What the worker gives back for one step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.engine.core.pooling import Embedding
from octavo.engine.core.scheduler_output import SchedulerOutput

NOTHING_LEFT = "the masks of the request leave no token that could be produced"
"""The reason in `ModelOutput.failed` that is the request's own fault."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-softmax of the raw logits at one position.

    `rank` is 1 for the best token. `top` holds the best alternatives as (id, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class BeamCandidate(NamedTuple):
    """A continuation of a beam: the id and its log-softmax after masks and bias.

    `record` is what is reported of the id, where log-probabilities are asked for.
    """

    token_id: int
    logprob: float
    record: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Results per seq_id.

    `sampled`: the ids drawn, for every scheduled sequence with `sample` and for each of its forks.
    `logprobs`: one entry per sampled id, where asked for.
    `prompt_logprobs`: entries for the prompt positions whose *next* prompt token was scored in
    this step, in order, where asked for.
    `embeddings`: vectors of sequences with `sample` that asked for pooling; they
    have no entry in `sampled`.
    `candidates`: the likeliest continuations of beams with `sample`, best first; they have no
    entry in `sampled`, since the scheduler chooses.
    `failed`: sequences whose row could not be used (NaN logits, NOTHING_LEFT), with a reason;
    they have no entry in `sampled`.
    """

    sampled: Mapping[int, tuple[int, ...]]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    embeddings: Mapping[int, Embedding] = field(default_factory=dict)
    candidates: Mapping[int, tuple[BeamCandidate, ...]] = field(default_factory=dict)


Wait = Callable[[], ModelOutput]
"""Waits for the results of a step that was launched."""

Launch = Callable[[SchedulerOutput], Wait]
"""Starts a step without waiting for it."""
