"""What prefix caching gives where prompts share their beginnings, and costs where none do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from octavo.loadtest.memory.engine import CacheShape, ModelChoice, Run, make_engine, run
from octavo.loadtest.workload import Prompt

DrawPrompts = Callable[[], list[Prompt]]


@dataclass(frozen=True, slots=True)
class Pair:
    """One round: the same work with prefix caching and without."""

    cached: Run
    uncached: Run

    @property
    def speedup(self) -> float:
        """How many times as fast the run with caching was."""
        return self.uncached.seconds / self.cached.seconds


def compare_caching(
    choice: ModelChoice, shape: CacheShape, draw: DrawPrompts, rounds: int
) -> Iterator[Pair]:
    """Run fresh prompts in each round, with and without caching in turn.

    The two engines are alive together, and who goes first alternates, so that neither gains from
    a change of the machine. The first round is warm-up and is not given.
    """
    engines = [make_engine(choice, replace(shape, caching=caching)) for caching in (True, False)]
    for number in range(rounds + 1):
        prompts = draw()
        runs: dict[bool, Run] = {}
        for caching in (True, False) if number % 2 else (False, True):
            engine = engines[0] if caching else engines[1]
            runs[caching] = run(engine, prompts)
            engine.reset_prefix_cache()
        if number:
            yield Pair(runs[True], runs[False])


@dataclass(frozen=True, slots=True)
class ZeroHits:
    """What caching costs at zero hits.

    `host_seconds` is the processor time that bookkeeping takes longer in one run of `num_tokens`
    tokens, taken without a model, where nothing else takes time; `model_seconds` is that run with
    the model. `direct` are the rounds with the model, whose noise is of the size of what is looked
    for.
    """

    host_seconds: float
    num_tokens: int
    model_seconds: float
    direct: list[Pair]

    @property
    def lost(self) -> float:
        """Share of the throughput that is lost, 0 to 1, from the bookkeeping's time."""
        return self.host_seconds / (self.model_seconds + self.host_seconds)

    @property
    def directly_lost(self) -> float:
        """The same from the rounds with the model: their median."""
        return 1 - median(pair.speedup for pair in self.direct)


def measure_zero_hits(
    choice: ModelChoice, shape: CacheShape, draw: DrawPrompts, rounds: int, host_rounds: int
) -> ZeroHits:
    """Compare the same requests with and without caching; none has a prefix that was seen."""
    host = list(compare_caching(replace(choice, weights=False), shape, draw, host_rounds))
    direct = list(compare_caching(choice, shape, draw, rounds))
    return ZeroHits(
        median(pair.cached.host_seconds - pair.uncached.host_seconds for pair in host),
        host[0].cached.num_prompt_tokens + host[0].cached.num_output_tokens,
        median(pair.uncached.seconds for pair in direct),
        direct,
    )
