"""A thread leaves its processor and keeps the right to come back."""

import os
from collections.abc import Iterator

import numba
import pytest

from octavo.kernels.cpu.placement import current_processor, leave_processor


@numba.njit
def _processor() -> int:
    return current_processor()  # type: ignore[no-any-return]  # Numba has no types


@numba.njit
def _leave(processor: int) -> int:
    """The processor right after."""
    leave_processor(processor)
    return current_processor()  # type: ignore[no-any-return]


@pytest.fixture
def allowed() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_a_thread_goes_to_another_processor(allowed: set[int]) -> None:
    if len(allowed) < 2:
        pytest.skip("there is no other")
    for processor in allowed:
        os.sched_setaffinity(0, {processor})
        assert _processor() == processor
        os.sched_setaffinity(0, allowed)
        assert _leave(processor) != processor
        assert os.sched_getaffinity(0) == allowed


def test_a_thread_that_may_use_one_processor_stays(allowed: set[int]) -> None:
    only = min(allowed)
    os.sched_setaffinity(0, {only})
    _leave(only)
    assert _processor() == only
    assert os.sched_getaffinity(0) == {only}
