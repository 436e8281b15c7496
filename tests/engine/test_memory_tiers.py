"""Greedy texts of a real model while its blocks are swapped, offloaded and shared, in fp32."""

from typing import Any

import pytest
from hf_pair import Pair, make_pair, random_ids
from model_engine import ModelEngine

from octavo.engine.core.limits import HostMemory


@pytest.fixture(scope="module", params=["llama", "mistral"])
def pair(request: pytest.FixtureRequest) -> Pair:
    window = {"sliding_window": 9} if request.param == "mistral" else {}
    return make_pair(request.param, **window)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_f02_texts_survive_preemption_of_both_kinds(pair: Pair, mode: str, caching: bool) -> None:
    engine = ModelEngine(
        pair.ours,
        num_blocks=20,
        cache={"enable_prefix_caching": caching},
        scheduler={"preemption_mode": mode},
        host_memory=HostMemory(100),
    )
    prompts = [random_ids(5 + 3 * number, seed=number) for number in range(6)]
    for number, prompt in enumerate(prompts):
        engine.add(f"r{number}", prompt, max_tokens=24)
    engine.run()
    stats = engine.engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_preemptions_by_swap > 0) == (mode == "swap")
    for number, prompt in enumerate(prompts):
        pair.assert_greedy(prompt, engine.text(f"r{number}"))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_f02_choices_that_gave_way_as_a_group_draw_what_they_draw_alone(
    pair: Pair, mode: str, caching: bool
) -> None:
    options = {"n": 3, "temperature": 1.0, "max_tokens": 18}
    prompts = [random_ids(7 + 4 * number, seed=number) for number in range(3)]
    engine = ModelEngine(
        pair.ours,
        num_blocks=24,
        max_num_seqs=9,
        cache={"enable_prefix_caching": caching},
        scheduler={"preemption_mode": mode},
        host_memory=HostMemory(100),
    )
    for number, prompt in enumerate(prompts):
        engine.add(f"r{number}", prompt, seed=number, **options)
    engine.run()
    stats = engine.engine.stats()
    assert stats.num_preemptions > 3
    assert (stats.num_preemptions_by_swap > 0) == (mode == "swap")
    for number, prompt in enumerate(prompts):
        alone = ModelEngine(pair.ours)
        alone.add("alone", prompt, seed=number, **options)
        alone.run()
        for index in range(3):
            assert engine.text(f"r{number}", index) == alone.text("alone", index)


def test_offloaded_blocks_hold_what_was_computed(pair: Pair) -> None:
    engine = ModelEngine(pair.ours, num_blocks=12, host_memory=HostMemory(0, 40))
    prompts = [random_ids(30, seed=number) for number in range(3)]
    for visit in range(2):
        for number, prompt in enumerate(prompts):
            options: dict[str, Any] = {"max_tokens": 8}
            engine.add(f"{visit}.{number}", prompt, **options)
            engine.run()
            pair.assert_greedy(prompt, engine.text(f"{visit}.{number}"))
    assert engine.engine.stats().num_offload_hits > 0
