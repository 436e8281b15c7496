"""Steps of the runner: copies, chunks, prompt scores, rows that come and go."""

from collections.abc import Callable

import numpy as np
import pytest

from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.worker.sampler import NOT_FINITE

V = 50
MakeDriver = Callable[..., object]


def random_table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (V, V)).astype(np.float32)


def test_copies_come_before_the_writes_of_the_step(make_driver: MakeDriver) -> None:
    driver = make_driver(random_table(0))
    driver.add(1, [11, 12, 13])
    driver.step()  # leaves row 3 of its block to the next step
    (source,) = driver.sequences[1].block_ids
    destination = driver.copy_block(source)
    driver.step()
    for layer in driver.kv_cache.layers:
        assert layer.key[destination].flatten().tolist() == [11, 12, 13, 0]
        assert layer.key[source].flatten().tolist()[3] != 0


def test_a_plan_without_work_only_frees_rows(make_driver: MakeDriver) -> None:
    driver = make_driver(random_table(0))
    driver.add(1, [11])
    driver.step()
    driver.remove(1)
    assert driver.step().sampled == {}
    driver.add(1, [11])
    assert 1 in driver.step().sampled


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_prompt_logprobs_score_each_next_prompt_token_once(
    make_driver: MakeDriver, chunk: int
) -> None:
    table = random_table(1).astype(np.float64)
    exact = table - np.log(np.exp(table).sum(-1, keepdims=True))
    prompt = [5, 9, 2, 2, 40, 7, 8]
    driver = make_driver(table.astype(np.float32))
    driver.add(2, [1, 2, 3, 4, 5])
    wanted = SamplingParams(max_tokens=9, temperature=0, prompt_logprobs=3)
    driver.add(1, prompt, wanted)
    driver.run(3, chunk)
    records = [record for output in driver.outputs for record in output.prompt_logprobs.get(1, ())]
    assert all(2 not in output.prompt_logprobs for output in driver.outputs)
    assert [record.token_id for record in records] == prompt[1:]
    for before, record in zip(prompt, records, strict=False):
        assert record.logprob == pytest.approx(exact[before, record.token_id], abs=1e-4)
        best = np.argsort(-exact[before], kind="stable")
        assert [token for token, _ in record.top] == best[:3].tolist()
        assert record.rank == 1 + best.tolist().index(record.token_id)


def test_a_prompt_is_not_scored_again_behind_its_first_output(make_driver: MakeDriver) -> None:
    driver = make_driver(random_table(1))
    scored = SamplingParams(max_tokens=9, temperature=0, prompt_logprobs=0)
    driver.add(1, [5, 9, 2], scored, output=(4,))
    driver.add(2, [5, 9, 2], scored)
    output = driver.step()
    assert set(output.sampled) == {1, 2} and set(output.prompt_logprobs) == {2}


def test_long_prompts_are_scored_in_pieces(make_driver: MakeDriver) -> None:
    driver = make_driver(random_table(2))
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, V, 200)]
    driver.add(1, prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    records = driver.step().prompt_logprobs[1]
    assert [record.token_id for record in records] == prompt[1:]


def test_nan_at_a_prompt_position_fails_its_sequence_alone(make_driver: MakeDriver) -> None:
    table = random_table(3)
    table[13, 0] = np.nan
    driver = make_driver(table)
    wanted = SamplingParams(max_tokens=9, temperature=0, prompt_logprobs=0)
    driver.add(1, [1, 13, 2], wanted)
    driver.add(2, [1, 2, 3], wanted)
    output = driver.step()
    assert output.failed == {1: NOT_FINITE}
    assert set(output.sampled) == set(output.prompt_logprobs) == {2}


def test_a_plan_that_names_an_unknown_sequence_is_refused(make_driver: MakeDriver) -> None:
    driver = make_driver(random_table(0))
    with pytest.raises(KeyError):
        driver.runner.execute(SchedulerOutput(0, (), (), (7,), ()))
