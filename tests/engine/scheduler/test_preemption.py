"""Preemption by swap and by recomputation: who chooses, and that nobody notices. Block size 4."""

from typing import Any

import pytest
from engine_harness import Harness, Sizes
from simulated_model import solo_text

from octavo.engine.core.limits import HostMemory, PreemptionCosts


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + number) % 997 for number in range(length)]


def two_that_collide(mode: str, host: HostMemory, **options: Any) -> Harness:
    """The younger of two requests has been preempted, but for what `options` change."""
    harness = Harness(Sizes(num_blocks=8, host_memory=host), preemption_mode=mode)
    for number in range(2):
        harness.add(f"r{number}", prompt(12, 50 * number), max_tokens=12, **options)
    while harness.engine.stats().num_preemptions == 0:
        harness.step()
    return harness


def check_texts(harness: Harness, **options: Any) -> None:
    for number in range(2):
        ids = prompt(12, 50 * number)
        params = harness.choices[f"r{number}", 0]
        assert len(params.token_ids) == 12
        solo = Harness()
        asked = solo.add("solo", ids, max_tokens=12, **options)
        assert harness.text(f"r{number}") == solo_text(ids, asked)


def test_swapped_blocks_are_neither_lost_nor_computed_again() -> None:
    harness = two_that_collide("swap", HostMemory(8))
    assert len(harness.plan.swap_out) == 4
    assert harness.engine.stats().num_used_swap_blocks == 4
    harness.run()
    check_texts(harness)
    stats = harness.engine.stats()
    assert (stats.num_preemptions_by_swap, stats.num_swapped_out_blocks) == (1, 4)
    assert sum(plan.num_tokens for plan in harness.executor.plans) == 2 * (12 + 11)


@pytest.mark.parametrize(
    ("mode", "host", "swapped"),
    [
        ("recompute", HostMemory(8, 0, PreemptionCosts(1.0, 0.0)), 0),
        ("swap", HostMemory(8, 0, PreemptionCosts(0.0, 1.0)), 1),
        # Four blocks of four tokens, there and back: cheaper below two tokens a copy.
        ("auto", HostMemory(8, 0, PreemptionCosts(1.0, 1.8)), 1),
        ("auto", HostMemory(8, 0, PreemptionCosts(1.0, 2.2)), 0),
        ("auto", HostMemory(8), 0),
        ("swap", HostMemory(3), 0),
        ("swap", HostMemory(0), 0),
    ],
)
def test_mode_costs_and_room_decide(mode: str, host: HostMemory, swapped: int) -> None:
    harness = two_that_collide(mode, host)
    stats = harness.engine.stats()
    assert (stats.num_preemptions, stats.num_preemptions_by_swap) == (1, swapped)
    harness.run()
    check_texts(harness)


def test_what_the_worker_gathers_from_a_whole_prompt_is_computed_again() -> None:
    sizes = Sizes(
        num_blocks=14, max_num_seqs=2, max_num_batched_tokens=2, host_memory=HostMemory(20)
    )
    harness = Harness(sizes, preemption_mode="swap")
    harness.add("old", prompt(1, 50), max_tokens=50)
    harness.step()
    harness.add("a", prompt(30), max_tokens=2, prompt_logprobs=0)
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_preemptions > 0 and stats.num_preemptions_by_swap == 0


def test_f07_a_swapped_request_can_be_aborted() -> None:
    harness = two_that_collide("swap", HostMemory(8))
    harness.engine.abort("r1")
    assert harness.engine.stats().num_used_swap_blocks == 0
    harness.run()
    assert (harness.reason("r0"), harness.reason("r1")) == ("length", "abort")


@pytest.mark.parametrize("index", [None, 0, 2])
@pytest.mark.parametrize(
    "kind",
    [
        {"temperature": 1.0, "seed": 4, "max_tokens": 26},
        {"use_beam_search": True, "max_tokens": 12},
    ],
    ids=["choices", "beams"],
)
def test_f07_swapped_groups_can_be_aborted_whole_and_in_part(
    kind: dict[str, Any], index: int | None
) -> None:
    sizes = Sizes(num_blocks=16, host_memory=HostMemory(40))
    harness = Harness(sizes, preemption_mode="swap")
    params = harness.add("old", prompt(8, 300), max_tokens=44)
    harness.add("a", prompt(20), n=3, **kind)
    while harness.engine.stats().num_preemptions_by_swap < 3:
        assert harness.reason("a") is None
        harness.step()
    assert harness.engine.stats().num_used_swap_blocks > 0
    harness.engine.abort("a", index)
    harness.engine.check_integrity()
    if index is None:
        assert harness.engine.stats().num_used_swap_blocks == 0
    harness.run()
    assert harness.text("old") == solo_text(prompt(8, 300), params)
    aborted = {other for other in range(3) if harness.reason("a", other) == "abort"}
    assert aborted == ({0, 1, 2} if index is None else {index})


def test_swapped_choices_copy_their_prompt_once() -> None:
    harness = Harness(Sizes(num_blocks=16, host_memory=HostMemory(40)), preemption_mode="swap")
    params = harness.add("old", prompt(8, 300), max_tokens=44)
    choices = harness.add("a", prompt(20), max_tokens=26, n=3, temperature=1.0, seed=4)
    harness.run()
    assert harness.text("old") == solo_text(prompt(8, 300), params)
    for index in range(3):
        assert harness.text("a", index) == solo_text(prompt(20), choices, index)
    # The five blocks of the prompt leave with the first choice, the others' own blocks follow.
    outs = [len(plan.swap_out) for plan in harness.executor.plans if plan.swap_out]
    assert outs[:3] == [5 + 2, 3, 4]


def test_a_cache_of_four_blocks_serves_twenty_requests() -> None:
    for mode in ("recompute", "swap"):
        harness = Harness(Sizes(num_blocks=4, host_memory=HostMemory(40)), preemption_mode=mode)
        expected = {}
        for number in range(20):
            ids = prompt(1 + number % 7, 10 * number)
            params = harness.add(f"r{number}", ids, max_tokens=16 - len(ids))
            expected[f"r{number}"] = solo_text(ids, params)
        harness.run()
        assert harness.engine.stats().num_preemptions > 0
        assert {name: harness.text(name) for name in expected} == expected
