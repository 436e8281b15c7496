"""The trade-off behind the block size: small ones waste less and hit more, large ones are fewer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.loadtest.memory.engine import CacheShape, ModelChoice, make_engine, run
from octavo.loadtest.memory.occupancy import Occupancy
from octavo.loadtest.workload import Prompt

SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class BlockSizeResult:
    """Figures of one block size.

    `table_entries` are those of the longest context: what one row of the block tables holds.
    `host_seconds` is the time of scheduling and bookkeeping for one request.
    """

    block_size: int
    waste: float
    hit_rate: float
    table_entries: int
    host_seconds: float
    output_rate: float | None


def measure_accounting(
    choice: ModelChoice, shape: CacheShape, prompts: Sequence[Prompt]
) -> BlockSizeResult:
    """Everything but the model's speed, without running it."""
    occupancy = Occupancy()
    null = replace(choice, weights=False)
    observed = run(make_engine(null, shape), prompts, occupancy)
    timed = run(make_engine(null, shape), prompts)
    return BlockSizeResult(
        block_size=shape.block_size,
        waste=occupancy.waste,
        hit_rate=observed.hit_rate,
        table_entries=-(-shape.max_model_len // shape.block_size),
        host_seconds=timed.host_seconds / len(prompts),
        output_rate=None,
    )


def measure_speed(choice: ModelChoice, shape: CacheShape, prompts: Sequence[Prompt]) -> float:
    """Generated tokens per second with the model, after a warm-up."""
    engine = make_engine(choice, shape)
    run(engine, [replace(prompt, output_len=2) for prompt in prompts[:2]])
    engine.reset_prefix_cache()
    return run(engine, prompts).output_rate
