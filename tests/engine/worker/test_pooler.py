"""Embeddings of a decoder against transformers: in chunks, in company, after preemption."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hf_pair import Pair, make_pair, random_ids

from octavo.engine.core.pooling import Pooling
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.worker.sampler import NOT_FINITE

MakeDriver = Callable[..., Any]
LENGTHS = (1, 16, 17, 40)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair("qwen3")


def embedding_params(pooling: Pooling) -> SamplingParams:
    return SamplingParams(max_tokens=0, pooling=pooling)


def expected(pair: Pair, prompt: list[int], pooling: Pooling) -> np.ndarray:
    with torch.no_grad():
        states = pair.theirs.model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    vector = {Pooling.LAST: states[-1], Pooling.CLS: states[0], Pooling.MEAN: states.mean(0)}
    return vector[pooling] / np.linalg.norm(vector[pooling])


def run(driver: Any, chunk: int) -> dict[int, np.ndarray]:
    """Steps until all prompts have been read; gives the embeddings by sequence."""
    embeddings: dict[int, np.ndarray] = {}
    pooled = {key for key, item in driver.sequences.items() if item.params.pooling is not None}
    while pooled:
        embeddings |= (made := driver.step(chunk).embeddings)
        for seq_id in made:
            driver.remove(seq_id)
            pooled.remove(seq_id)
    return embeddings


def driver_for(pair: Pair, make_driver: MakeDriver) -> Any:
    config = pair.ours.config
    heads = (config.num_kv_heads, config.head_dim)
    return make_driver(pair.ours, vocab_size=config.vocab_size, block_size=16, heads=heads)


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("pooling", Pooling)
def test_embeddings_equal_transformers(
    pair: Pair, make_driver: MakeDriver, pooling: Pooling, chunk: int
) -> None:
    driver = driver_for(pair, make_driver)
    prompts = {length: random_ids(length, seed=length) for length in LENGTHS}
    for length, prompt in prompts.items():
        driver.add(length, prompt, embedding_params(pooling))
    embeddings = run(driver, chunk)
    for length, prompt in prompts.items():
        # fp32 sums in another order
        np.testing.assert_allclose(
            embeddings[length], expected(pair, prompt, pooling), atol=2e-5, err_msg=str(length)
        )


def test_embedding_and_generating_sequences_share_a_step(
    pair: Pair, make_driver: MakeDriver
) -> None:
    driver = driver_for(pair, make_driver)
    embedded, generated = random_ids(20, seed=1), random_ids(20, seed=2)
    driver.add(1, generated)
    driver.add(2, embedded, embedding_params(Pooling.LAST))
    driver.add(3, generated)
    output = driver.step()
    assert set(output.sampled) == {1, 3}
    assert set(output.embeddings) == {2}
    driver.remove(2)
    produced = driver.run(5)
    pair.assert_greedy(generated, produced[1])
    pair.assert_greedy(generated, produced[3])


def test_a_mean_survives_preemption(pair: Pair, make_driver: MakeDriver) -> None:
    driver = driver_for(pair, make_driver)
    prompt = random_ids(30, seed=3)
    driver.add(1, random_ids(5, seed=4))
    driver.add(2, prompt, embedding_params(Pooling.MEAN))
    driver.step(11)
    driver.preempt(2)
    embeddings = run(driver, 11)
    np.testing.assert_allclose(embeddings[2], expected(pair, prompt, Pooling.MEAN), atol=2e-5)


def test_a_vector_that_is_not_finite_fails_its_request_alone(make_driver: MakeDriver) -> None:
    table = np.eye(8, dtype=np.float32)
    table[3, 0] = np.nan
    driver = make_driver(table)
    for seq_id in (1, 2):
        driver.add(seq_id, [1, 1 + 2 * (seq_id - 1)], embedding_params(Pooling.MEAN))
    output = driver.step()
    assert output.failed == {2: NOT_FINITE}
    np.testing.assert_allclose(output.embeddings[1], table[1])
