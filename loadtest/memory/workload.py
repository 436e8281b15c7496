"""What the benchmarks of memory ask: requests with the lengths of real conversations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.loadtest.workload import Prompt, Vocabulary

# Widths of the logarithms of question and answer lengths, near those of the ShareGPT data.
_INPUT_SIGMA = 1.0
_OUTPUT_SIGMA = 0.8
_SHORTEST = 4
MEAN_INPUT_LEN = 220
MEAN_OUTPUT_LEN = 180


@dataclass(frozen=True, slots=True)
class Beginnings:
    """What prompts have in common: `count` texts of a sixth of `longest` to `longest` tokens."""

    count: int
    longest: int


def conversation_lengths(
    rng: np.random.Generator, count: int, longest: int, scale: float = 1.0
) -> list[tuple[int, int]]:
    """Pairs of prompt and answer length: log-normal, mean 220 in and 180 out, times `scale`.

    Each is at most half of `longest`.
    """
    columns = [
        _log_normal(rng, mean * scale, sigma, count, longest // 2)
        for mean, sigma in ((MEAN_INPUT_LEN, _INPUT_SIGMA), (MEAN_OUTPUT_LEN, _OUTPUT_SIGMA))
    ]
    return list(zip(*columns, strict=True))


def _log_normal(
    rng: np.random.Generator, mean: float, sigma: float, count: int, longest: int
) -> list[int]:
    drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    # A small sample of so wide a distribution misses its mean by far, so it is scaled to it.
    for _ in range(20):
        drawn = np.clip(drawn * (mean / drawn.mean()), _SHORTEST, longest)
    return [round(length) for length in drawn.tolist()]


def conversations(
    rng: np.random.Generator, vocabulary: Vocabulary, lengths: Sequence[tuple[int, int]]
) -> list[Prompt]:
    """Prompts of these lengths that have nothing in common."""
    return [
        vocabulary.prompt(vocabulary.draw(rng, input_len), output_len)
        for input_len, output_len in lengths
    ]


def with_shared_beginnings(
    rng: np.random.Generator, vocabulary: Vocabulary, prompts: Sequence[Prompt], shared: Beginnings
) -> list[Prompt]:
    """The same prompts, each after one of the beginnings."""
    lengths = rng.integers(shared.longest // 6, shared.longest + 1, shared.count).tolist()
    heads = [vocabulary.draw(rng, length) for length in lengths]
    return [
        vocabulary.prompt([*heads[number % shared.count], *prompt.content], prompt.output_len)
        for number, prompt in enumerate(prompts)
    ]
