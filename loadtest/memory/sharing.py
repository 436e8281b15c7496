"""Blocks that are saved by sharing: choices, beams and system prompts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.engine.llm_engine import LLMEngine
from octavo.loadtest.memory.engine import CacheShape, ModelChoice, make_engine, run
from octavo.loadtest.memory.occupancy import Sharing
from octavo.loadtest.workload import (
    Lengths,
    Prefixes,
    Prompt,
    Vocabulary,
    prefix_repetition_prompts,
    random_prompts,
)


@dataclass(frozen=True, slots=True)
class SharingCase:
    """Requests that share, and how their texts are drawn."""

    name: str
    prompts: list[Prompt]
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SharingSizes:
    """How many requests, and their lengths in tokens."""

    lengths: Lengths
    num_requests: int
    system: Prefixes
    system_output_len: int
    num_system_requests: int


def sharing_cases(
    rng: np.random.Generator, vocabulary: Vocabulary, sizes: SharingSizes
) -> list[SharingCase]:
    """The cases, each with prompts of its own."""

    def prompts() -> list[Prompt]:
        return random_prompts(rng, vocabulary, sizes.num_requests, sizes.lengths)

    system = prefix_repetition_prompts(
        rng, vocabulary, sizes.num_system_requests, sizes.system, sizes.system_output_len
    )
    return [
        SharingCase("4 choices (n=4)", prompts(), {"n": 4, "temperature": 1.0, "seed": 1}),
        SharingCase("8 choices (n=8)", prompts(), {"n": 8, "temperature": 1.0, "seed": 1}),
        SharingCase("4 beams", prompts(), {"n": 4, "use_beam_search": True}),
        SharingCase(
            f"system prompt of {sizes.system.prefix_len} tokens, {len(system)} requests", system
        ),
    ]


def make_sharing_engine(choice: ModelChoice, sizes: SharingSizes) -> LLMEngine:
    """An engine whose cache holds every case without a preemption."""
    longest = sizes.lengths.input_len + sizes.lengths.output_len
    system_len = sizes.system.prefix_len + sizes.system.suffix_len + sizes.system_output_len
    num_tokens = max(8 * sizes.num_requests * longest, sizes.num_system_requests * system_len)
    return make_engine(choice, CacheShape(num_tokens + 4096, max(longest, system_len)))


def measure_sharing(
    engine: LLMEngine, cases: list[SharingCase]
) -> Iterator[tuple[SharingCase, Sharing]]:
    """Run the cases one after the other."""
    for case in cases:
        sharing = Sharing()
        run(engine, case.prompts, sharing, case.sampling)
        yield case, sharing
