"""Random numbers by name and position."""

import numpy as np
import pytest

from octavo.engine.worker.random_streams import uniforms


def test_numbers_depend_on_their_own_entry_only() -> None:
    seeds = np.array([0, 42, -1, 2**63 - 1, -(2**63)], np.int64)
    choices = np.arange(5, dtype=np.int64)
    positions = np.arange(5, dtype=np.int64) * 1000
    together = uniforms(seeds, choices, positions)
    for place in range(5):
        one = slice(place, place + 1)
        assert uniforms(seeds[one], choices[one], positions[one]) == together[one]


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_numbers_are_uniform_and_uncorrelated_along_each_argument(varied: str) -> None:
    count = 40_000
    arguments = {name: np.zeros(count, np.int64) for name in ("seed", "choice", "position")}
    arguments[varied] = np.arange(count)
    numbers = uniforms(arguments["seed"], arguments["choice"], arguments["position"])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    observed = np.histogram(numbers, bins=64, range=(0, 1))[0]
    statistic = ((observed - count / 64) ** 2 / (count / 64)).sum()
    assert statistic < 129  # chi-square with 63 degrees of freedom at 1e-6
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / np.sqrt(count)


def test_streams_differ_by_seed_choice_and_position() -> None:
    grid = np.array([(s, c, p) for s in range(20) for c in range(20) for p in range(20)], np.int64)
    numbers = uniforms(grid[:, 0], grid[:, 1], grid[:, 2])
    assert np.unique(numbers).size == numbers.size
