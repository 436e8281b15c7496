"""When steps share their work among threads, by times that are made up."""

from collections.abc import Callable

import pytest

from octavo.kernels.cpu.thread_choice import ThreadChoice


class _Machine:
    """Runs steps that take what `seconds` says for (shares its work)."""

    def __init__(self, seconds: Callable[[bool], float]) -> None:
        self.seconds = seconds
        self.choice = ThreadChoice()

    def run(self, steps: int, num_tokens: int = 8) -> float:
        """The share of steps that were shared."""
        shared = 0
        for _ in range(steps):
            shared += _step(self.choice, num_tokens, self.seconds)
        return shared / steps


def _step(choice: ThreadChoice, size: int, seconds: Callable[[bool], float]) -> bool:
    """Whether it was shared."""
    shares = choice.shares(size)
    choice.ended(size, seconds(shares))
    return shares


def _idle(shares: bool) -> float:
    return 0.01 if shares else 0.015


def _busy(shares: bool) -> float:
    return 0.022 if shares else 0.015


def test_an_idle_machine_shares_nearly_every_step() -> None:
    machine = _Machine(_idle)
    assert machine.run(500) > 0.94
    assert machine.run(5000) > 0.99


def test_steps_run_alone_where_a_core_is_busy() -> None:
    machine = _Machine(_busy)
    machine.run(100)
    assert machine.run(5000) < 0.01


def test_a_core_that_becomes_busy_is_noticed_soon() -> None:
    machine = _Machine(_idle)
    machine.run(5000)
    machine.seconds = _busy
    machine.run(60)
    assert not machine.choice.shares(8)


def test_a_core_that_becomes_free_is_noticed() -> None:
    machine = _Machine(_busy)
    machine.run(200)
    machine.seconds = _idle
    machine.run(600)
    assert machine.choice.shares(8)


def test_a_small_gain_changes_nothing() -> None:
    machine = _Machine(lambda shares: 0.0105 if shares else 0.01)
    assert machine.run(1000) > 0.9


def test_steps_are_held_against_those_of_their_size() -> None:
    choice = ThreadChoice()
    for step in range(2000):
        size = step // 3 % 5  # never so long the same as a trial
        _step(choice, size, lambda shares, size=size: (1 + size) / 5 * _idle(shares))
    assert choice.shares(0)


@pytest.mark.parametrize("length", [1, 5, 9, 50])
def test_changing_sizes_hide_neither_a_busy_core_nor_a_free_one(length: int) -> None:
    choice = ThreadChoice()
    shared = {_busy: 0, _idle: 0}
    for machine in (_busy, _idle):
        for step in range(2000):
            size = step // length % 4
            shared[machine] += _step(
                choice, size, lambda shares, n=1 + size, run=machine: n / 5 * run(shares)
            )
    assert shared[_busy] < 200
    assert shared[_idle] > 1600


def test_sizes_never_seen_before_end_a_trial_without_a_verdict() -> None:
    choice = ThreadChoice()
    for _ in range(40):
        if not _step(choice, 0, _busy):
            break
    for size in range(1, 20):
        _step(choice, size, _busy)
    assert choice.shares(0)


def test_a_hopeless_trial_ends_with_its_first_step() -> None:
    machine = _Machine(lambda shares: 0.02 if shares else 0.036)
    shared = machine.run(1000) * 1000
    # Trials after 32, 64, 128, 256 and 512 steps.
    assert round(shared) == 1000 - 5


def test_long_steps_are_no_part_of_a_trial() -> None:
    choice = ThreadChoice()
    tried = 0
    for _ in range(300):
        assert _step(choice, 288, lambda shares: 0.18 if shares else 0.35)
        tried += not _step(choice, 8, _idle)
    assert tried > 0
