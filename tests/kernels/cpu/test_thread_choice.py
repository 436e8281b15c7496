"""When steps share their work among threads, by times that are made up."""

from collections.abc import Callable

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
            shares = self.choice.shares
            shared += shares
            self.choice.ended(num_tokens, self.seconds(shares))
        return shared / steps


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
    assert not machine.choice.shares


def test_a_core_that_becomes_free_is_noticed() -> None:
    machine = _Machine(_busy)
    machine.run(200)
    machine.seconds = _idle
    machine.run(600)
    assert machine.choice.shares


def test_a_small_gain_changes_nothing() -> None:
    machine = _Machine(lambda shares: 0.0105 if shares else 0.01)
    assert machine.run(1000) > 0.9


def test_steps_of_another_size_are_not_compared() -> None:
    machine = _Machine(_busy)
    for num_tokens in range(1, 100):
        machine.run(2, num_tokens)
    assert machine.choice.shares


def test_a_trial_that_is_given_up_leaves_the_usual_way() -> None:
    machine = _Machine(_busy)
    while machine.choice.shares:
        machine.run(1)
    machine.run(1, num_tokens=9)
    assert machine.choice.shares


def test_prompts_go_the_way_of_the_short_steps() -> None:
    machine = _Machine(_busy)
    machine.run(1000, num_tokens=512)
    assert machine.choice.shares
