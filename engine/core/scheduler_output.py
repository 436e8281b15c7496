"""The frozen plan of one step, made by the scheduler and carried out by the worker."""

from dataclasses import dataclass

from octavo.engine.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters the batch, in full: a first start, a fork or a resume.

    `token_ids` are all known tokens; the first `num_computed_tokens` need no computing.
    `block_ids` is the whole block table. `index` is the choice number within the request, which
    with `seed` names the random stream.
    """

    seq_id: int
    index: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Fork:
    """A child that draws its first token from its parent's logits row in this step."""

    seq_id: int
    index: int


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """What one sequence computes in this step.

    Its next `num_tokens` known tokens are computed. `new_block_ids` are written into the block
    table from entry `block_offset` on (for a NewSequence they are in its table already and this is
    empty); an offset below the table's length replaces an entry after a copy-on-write.
    `sample` says that the step reaches the last known token, so that an id is drawn; then each of
    `forks` draws one from the same logits too. A beam gets candidates instead of an id.
    `new_token_ids` are known ids that were chosen elsewhere and come after those that the worker
    knows: how a beam goes on.
    """

    seq_id: int
    num_tokens: int
    block_offset: int
    new_block_ids: tuple[int, ...]
    sample: bool
    forks: tuple[Fork, ...] = ()
    new_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. The worker first frees the rows of `removed_seq_ids` (finished and preempted),
    does the copies before any write, adds `new_sequences`, and then computes `scheduled` in the
    order given.

    Copies are pairs (source, destination) and come in three rounds: `swap_out` from the cache to
    host memory, then `swap_in` back, then `block_copies` within the cache. A block may be the
    destination of a later round.

    No two `block_copies` have the same destination, and no source is the destination of an earlier
    pair. A destination can be the source of an earlier pair: copy in order, or read all sources
    first.
    """

    step: int
    new_sequences: tuple[NewSequence, ...]
    scheduled: tuple[ScheduledSequence, ...]
    removed_seq_ids: tuple[int, ...]
    block_copies: tuple[tuple[int, int], ...]
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(item.num_tokens for item in self.scheduled)
