"""How the token budget is shared."""

import pytest

from octavo.engine.scheduler.step_plan import chunk_size


@pytest.mark.parametrize(
    ("num_wanted", "budget", "num_others", "threshold", "size"),
    [
        (100, 64, 0, 0, 64),
        (10, 64, 3, 0, 10),
        (64, 64, 1, 0, 64),
        (65, 64, 1, 0, 32),
        (100, 5, 1, 0, 3),
        (100, 3, 2, 0, 1),
        (100, 1, 4, 0, 1),
        (100, 64, 0, 16, 16),
        (100, 64, 1, 16, 16),
        (100, 20, 1, 16, 10),
        (10, 64, 0, 16, 10),
    ],
)
def test_f15_chunk_size(
    num_wanted: int, budget: int, num_others: int, threshold: int, size: int
) -> None:
    assert chunk_size(num_wanted, budget, num_others, threshold) == size
