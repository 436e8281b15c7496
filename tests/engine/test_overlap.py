"""Steps that are planned while the one before runs. Block size 4; the simulated executor checks."""

import pytest
from engine_harness import Harness, Sizes
from simulated_model import solo_text

from octavo.engine.core.request import FinishReason


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + number) % 997 for number in range(length)]


def num_planned(harness: Harness, seq_id: int) -> int:
    """Rows that a sequence was given in all plans."""
    return sum(item.seq_id == seq_id for plan in harness.executor.plans for item in plan.scheduled)


def test_the_next_step_is_launched_before_the_results_of_one_are_taken() -> None:
    harness = Harness(overlap=True)
    harness.add("a", prompt(5), max_tokens=4)
    harness.step()
    assert len(harness.executor.plans) == 2 and len(harness.text("a")) == 1


def test_the_figures_of_a_step_are_those_of_the_one_that_was_delivered() -> None:
    harness = Harness(overlap=True)
    harness.add("a", prompt(5), max_tokens=3)
    figures = []
    while harness.engine.has_work():
        harness.step()
        stats = harness.engine.stats()
        figures.append((stats.num_steps, stats.last_step_tokens))
    assert figures == [(1, 5), (2, 1), (3, 1)]


def test_slots_that_a_step_writes_just_now_are_no_waste() -> None:
    harness = Harness(Sizes(num_blocks=16), overlap=True)
    harness.add("a", prompt(44), max_tokens=3)
    found = []
    while harness.engine.has_work():
        harness.step()
        block_map = harness.engine.block_map()
        filled = sum(block.num_filled for block in block_map.blocks if block.ref_count)
        stats = harness.engine.stats()
        assert stats.num_wasted_slots == block_map.num_wasted_slots
        found.append((stats.num_used_blocks, filled, stats.num_wasted_slots))
    # The first chunk of 32 is there, the other 12 are being written; then one token a step.
    assert found == [(11, 44, 0), (12, 45, 3), (12, 46, 2), (0, 0, 0)]


def test_a_length_that_is_known_runs_no_row_in_vain() -> None:
    harness = Harness(overlap=True)
    params = harness.add("a", prompt(5), max_tokens=4)
    harness.run()
    assert harness.text("a") == solo_text(prompt(5), params)
    assert num_planned(harness, 0) == 4


def test_a_text_that_stops_runs_one_row_in_vain() -> None:
    text = solo_text(prompt(5), Harness().add("a", prompt(5), max_tokens=9))
    harness = Harness(Sizes(eos_token_ids=(text[3],)), overlap=True)
    harness.add("a", prompt(5), max_tokens=9, ignore_eos=False)
    harness.add("b", prompt(6, 50), max_tokens=9)
    harness.run()
    assert harness.text("a") == text[:4] and harness.reason("a") == FinishReason.STOP
    assert num_planned(harness, 0) == 5


def test_an_abort_under_a_running_step_gives_everything_back() -> None:
    harness = Harness(overlap=True)
    harness.add("a", prompt(5), max_tokens=50)
    params = harness.add("b", prompt(6, 50), max_tokens=9)
    harness.step()
    harness.engine.abort("a")
    harness.run()
    assert harness.reason("a") == FinishReason.ABORT
    assert harness.text("b") == solo_text(prompt(6, 50), params)


def test_a_row_that_fails_fails_once() -> None:
    params = Harness().add("a", prompt(5), max_tokens=9)
    harness = Harness(overlap=True)
    harness.add("a", prompt(5), max_tokens=9)
    harness.executor.failing_token = solo_text(prompt(5), params)[2]
    harness.run()
    assert harness.reason("a") == FinishReason.ERROR and len(harness.text("a")) == 2


def test_a_shortage_waits_for_results_before_anybody_is_preempted() -> None:
    harness = Harness(Sizes(num_blocks=8), overlap=True, preemption_mode="recompute")
    params = [
        harness.add(name, prompt(9, start), max_tokens=14) for name, start in (("a", 0), ("b", 50))
    ]
    harness.run()
    assert harness.text("a") == solo_text(prompt(9), params[0])
    assert harness.text("b") == solo_text(prompt(9, 50), params[1])
    assert harness.engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "options",
    [{"n": 2, "temperature": 1.0, "seed": 1}, {"prompt_logprobs": 0}],
    ids=["choices", "scores"],
)
def test_what_depends_on_results_is_waited_for(options: dict[str, object]) -> None:
    harness = Harness(overlap=True)
    harness.add("b", prompt(6, 50), max_tokens=9)
    harness.step()
    params = harness.add("a", prompt(5), max_tokens=6, **options)
    harness.run()
    for index in range(params.n):
        assert harness.text("a", index) == solo_text(prompt(5), params, index)
