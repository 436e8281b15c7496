"""Greedy ids of real models through the runner: alone, in chunks, in company, after preemption."""

from collections.abc import Callable

import pytest
from hf_pair import Pair, make_pair, random_ids

NUM_OUTPUT = 20
LENGTHS = (1, 15, 16, 17, 33, 50)
MakeDriver = Callable[..., object]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def pair(request: pytest.FixtureRequest) -> Pair:
    window = {"sliding_window": 11} if request.param == "mistral" else {}
    return make_pair(request.param, **window)


def driver_for(pair: Pair, make_driver: MakeDriver) -> object:
    config = pair.ours.config
    return make_driver(
        pair.ours,
        vocab_size=config.vocab_size,
        block_size=16,
        heads=(config.num_kv_heads, config.head_dim),
    )


@pytest.mark.parametrize("chunk", [7, 16, 1000])
def test_f14_greedy_ids_do_not_depend_on_chunks_or_company(
    pair: Pair, make_driver: MakeDriver, chunk: int
) -> None:
    driver = driver_for(pair, make_driver)
    prompts = {length: random_ids(length, seed=length) for length in LENGTHS}
    for length, prompt in prompts.items():
        driver.add(length, prompt)
        driver.step(chunk)  # each joins while the others are under way
    produced = driver.run(NUM_OUTPUT, chunk)
    for length, prompt in prompts.items():
        pair.assert_greedy(prompt, produced[length])


def test_f02_greedy_ids_survive_preemption(pair: Pair, make_driver: MakeDriver) -> None:
    driver = driver_for(pair, make_driver)
    prompts = {1: random_ids(20, seed=1), 2: random_ids(31, seed=2)}
    for seq_id, prompt in prompts.items():
        driver.add(seq_id, prompt)
    driver.run(5)
    driver.preempt(1)
    produced = driver.run(NUM_OUTPUT, chunk=9)
    for seq_id, prompt in prompts.items():
        pair.assert_greedy(prompt, produced[seq_id])
