"""Sampling of mixed batches, through the runner."""

from collections.abc import Callable

import numpy as np
import pytest

from octavo.engine.core.model_output import NOTHING_LEFT
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import Fork
from octavo.engine.worker.sampler import NOT_FINITE

V = 50
MakeDriver = Callable[..., object]


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, **changes)  # type: ignore[arg-type]


def known_table() -> np.ndarray:
    """Ids 1, 2, 3 and 4 follow every token with probability .5, .3, .15 and .05."""
    table = np.full((V, V), -np.inf)
    table[:, 1:5] = np.log([0.5, 0.3, 0.15, 0.05])
    return table.astype(np.float32)


def random_table(seed: int, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (V, V)).astype(np.float32)


def chi_square(counts: list[int], probabilities: np.ndarray) -> float:
    expected = probabilities * sum(counts)
    return float(((np.array(counts) - expected) ** 2 / expected).sum())


# Chi-square quantiles at 1 - 1e-6 for 1 and 3 degrees of freedom.
LIMIT = {1: 23.93, 3: 30.66}


def test_d08_rows_of_a_mixed_batch_keep_their_own_settings(make_driver: MakeDriver) -> None:
    kinds = {
        "A": params(temperature=0),
        "B": params(),
        "C": params(top_k=2),
        "D": params(top_p=0.75),
        "E": params(min_p=0.4),
        "F": params(temperature=2),
    }
    driver = make_driver(known_table())
    drawn: dict[str, list[int]] = {kind: [] for kind in kinds}
    for round_ in range(400):
        for place, kind in enumerate(kinds):
            driver.add(place, [round_ % V], kinds[kind], seed=round_)
        sampled = driver.step().sampled
        for place, kind in enumerate(kinds):
            drawn[kind] += sampled[place]
            driver.remove(place)
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    tempered = np.sqrt(probabilities) / np.sqrt(probabilities).sum()
    assert set(drawn["A"]) == {1}
    for kind in "CDE":
        counts = [drawn[kind].count(1), drawn[kind].count(2)]
        assert sum(counts) == 400
        assert chi_square(counts, np.array([5 / 8, 3 / 8])) < LIMIT[1]
    for kind, expected in (("B", probabilities), ("F", tempered)):
        counts = [drawn[kind].count(token) for token in range(1, 5)]
        assert sum(counts) == 400
        assert chi_square(counts, expected) < LIMIT[3]


@pytest.mark.parametrize("seed", [0, 42, -5, 2**63 - 1])
def test_d03_seeded_draws_do_not_depend_on_batch_mates(make_driver: MakeDriver, seed: int) -> None:
    table = random_table(1)
    wanted = params(temperature=0.8)
    driver = make_driver(table)
    driver.add(1, [3, 4], wanted, seed=seed)
    alone = driver.run(20)[1]
    driver = make_driver(table)
    for mate in range(10, 17):
        driver.add(mate, [mate], params(temperature=1 + mate / 40, top_p=0.9), seed=mate)
    driver.step()
    driver.add(1, [3, 4], wanted, seed=seed)
    driver.add(2, [3, 4], wanted, seed=seed)
    together = driver.run(20)
    assert together[1] == together[2] == alone
    driver = make_driver(table)
    driver.add(1, [3, 4], wanted, seed=seed + 1 if seed < 100 else 1)
    assert driver.run(20)[1] != alone


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"frequency_penalty": 0.5, "top_k": 20}])
def test_f02_preempted_sequences_draw_what_they_would_have_drawn(
    make_driver: MakeDriver, changes: dict[str, float]
) -> None:
    table = random_table(2)
    wanted = params(logprobs=2, **changes)
    driver = make_driver(table)
    driver.add(1, [3, 4, 5], wanted, seed=9)
    undisturbed = driver.run(15)[1]
    values = [output.logprobs[1][0] for output in driver.outputs]
    driver = make_driver(table)
    driver.add(1, [3, 4, 5], wanted, seed=9)
    driver.add(2, [8], params(), seed=1)
    driver.run(6)
    driver.preempt(1)
    driver.run(15, chunk=4)
    assert driver.sequences[1].token_ids[3:18] == undisturbed
    resumed = [output.logprobs[1][0] for output in driver.outputs if 1 in output.logprobs]
    assert resumed[:15] == values


def test_forks_draw_from_their_parents_row_with_streams_of_their_own(
    make_driver: MakeDriver,
) -> None:
    table = random_table(3, spread=0.1)
    wanted = params(logprobs=1)
    driver = make_driver(table)
    driver.add(1, [3, 4], wanted, seed=9)
    forks = tuple(Fork(seq_id, seq_id - 1) for seq_id in (2, 3))
    output = driver.step(forks={1: forks})
    firsts = [output.sampled[seq_id] for seq_id in (1, 2, 3)]
    assert len(set(firsts)) == 3
    for index, first in enumerate(firsts):
        lone = make_driver(table)
        lone.add(1, [3, 4], wanted, index=index, seed=9)
        output_alone = lone.step()
        assert output_alone.sampled[1] == first
        assert output_alone.logprobs[1] == output.logprobs[index + 1]


def test_greedy_takes_the_lowest_of_equal_ids_and_forks_agree(make_driver: MakeDriver) -> None:
    table = np.zeros((V, V), np.float32)
    table[:, [7, 30]] = 2.0
    driver = make_driver(table)
    driver.add(1, [3], params(temperature=0))
    driver.add(2, [3], params(temperature=1, top_p=0))
    output = driver.step(forks={1: (Fork(5, 1),)})
    assert output.sampled == {1: (7,), 5: (7,), 2: (7,)}


def test_d04_penalties_count_what_they_should(make_driver: MakeDriver) -> None:
    p, q, r = 10, 11, 12
    table = np.full((V, V), -5.0, np.float32)
    table[:, [p, q, r]] = [5.0, 4.0, 3.5]
    driver = make_driver(table)
    driver.add(1, [p, p, p], params(temperature=0, presence_penalty=2))
    driver.add(2, [p, p, p], params(temperature=0, frequency_penalty=2))
    driver.add(3, [p, p, p], params(temperature=0, repetition_penalty=2))
    driver.add(4, [p, p, p], params(temperature=0))
    assert driver.run(3) == {
        1: [p, q, r],
        2: [p, q, r],
        3: [q, r, p],
        4: [p, p, p],
    }


@pytest.mark.parametrize("seed", range(20))
def test_d04_greedy_ids_equal_the_formulas_on_random_tables(
    make_driver: MakeDriver, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table = random_table(seed, spread=1.0)
    prompt = rng.integers(0, V, 6).tolist()
    presence, frequency = rng.uniform(-1, 2, 2)
    repetition = rng.uniform(0.8, 1.5)
    tokens = list(prompt)
    for _ in range(12):
        logits = table[tokens[-1]].astype(np.float64)
        for token in set(tokens):
            logits[token] *= 1 / repetition if logits[token] > 0 else repetition
        for token in tokens[6:]:
            logits[token] -= frequency
        for token in set(tokens[6:]):
            logits[token] -= presence
        tokens.append(int(logits.argmax()))
    driver = make_driver(table)
    driver.add(
        1,
        prompt,
        params(
            temperature=0,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
        ),
    )
    driver.add(2, prompt, params(temperature=1))
    assert driver.run(12, chunk=4)[1] == tokens[6:]


@pytest.mark.parametrize("end", [V - 2, V - 1])
def test_d06_min_tokens_lets_every_end_through_at_the_right_index(
    make_driver: MakeDriver, end: int
) -> None:
    driver = make_driver(random_table(4), eos_token_ids=(V - 2, V - 1))
    wanted = params(temperature=0, min_tokens=4, logit_bias={end: 100.0})
    driver.add(1, [1] * 20, wanted)
    ids = driver.run(5)[1]
    assert ids[4] == end
    assert not {V - 2, V - 1} & set(ids[:4])


def test_h01_a_nan_row_fails_alone(make_driver: MakeDriver) -> None:
    table = random_table(5)
    table[40, 3] = np.nan
    table[41, 49] = np.inf
    table[42, :] = -np.inf
    healthy = make_driver(table)
    healthy.add(1, [1], params(temperature=0, logprobs=1))
    healthy.add(2, [2], params(), seed=3)
    expected = healthy.step()
    driver = make_driver(table)
    driver.add(40, [40], params(temperature=0, logprobs=1))
    driver.add(1, [1], params(temperature=0, logprobs=1))
    driver.add(41, [41], params(top_p=0.5, repetition_penalty=1.2))
    driver.add(2, [2], params(), seed=3)
    driver.add(42, [42], params())
    output = driver.step(forks={40: (Fork(50, 1),)})
    assert output.failed == dict.fromkeys((40, 50, 41, 42), NOT_FINITE)
    assert output.sampled == expected.sampled
    assert output.logprobs == expected.logprobs


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_anywhere_fails_alone_when_logprobs_are_wanted(
    make_driver: MakeDriver, value: float
) -> None:
    table = random_table(8)
    table[40, :] = value
    driver = make_driver(table)
    driver.add(1, [1], params(temperature=0, logprobs=1))
    driver.add(40, [40], params(temperature=0, logprobs=3))
    output = driver.step(forks={40: (Fork(50, 1),)})
    assert output.failed == dict.fromkeys((40, 50), NOT_FINITE)
    assert output.sampled == {1: (int(table[1].argmax()),)}
    assert set(output.logprobs) == {1}


def test_masks_that_leave_nothing_fail_their_sequence_alone(make_driver: MakeDriver) -> None:
    driver = make_driver(random_table(6), eos_token_ids=(9,))
    driver.add(1, [1], params(allowed_token_ids=(9,), min_tokens=1))
    driver.add(2, [1], params(allowed_token_ids=(9,)))
    output = driver.step()
    assert output.failed == {1: NOTHING_LEFT}
    assert output.sampled == {2: (9,)}


def test_padding_columns_are_never_drawn_nor_scored(make_driver: MakeDriver) -> None:
    table = np.concatenate((random_table(7), np.full((V, 14), 50.0, np.float32)), axis=1)
    driver = make_driver(table, vocab_size=V)
    driver.add(1, [1], params(temperature=0, logprobs=20, prompt_logprobs=5))
    driver.add(2, [2], params(temperature=2))
    driver.add(3, [3], params(temperature=2, top_p=0.99))
    assert max(max(ids) for ids in driver.run(10).values()) < V
    record = driver.outputs[0].logprobs[1][0]
    logits = random_table(7)[1].astype(np.float64)
    assert record.top[0][1] == pytest.approx(logits.max() - np.log(np.exp(logits).sum()), abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"temperature": 0.5},
        {"temperature": 2},
        {"top_k": 1},
        {"top_p": 0.1},
        {"logit_bias": {3: 50.0}, "presence_penalty": 1.0, "repetition_penalty": 1.5},
        {"allowed_token_ids": (3, 4)},
    ],
)
def test_d01_logprobs_are_those_of_the_raw_logits(
    make_driver: MakeDriver, changes: dict[str, object]
) -> None:
    table = random_table(8)
    table[:, 13] = -np.inf
    driver = make_driver(table)
    driver.add(1, [2], params(temperature=0))
    driver.add(2, [5], params(logprobs=5, **{"temperature": 1.0, **changes}), seed=4)
    driver.add(3, [6], params(logprobs=0), seed=4)
    output = driver.step()
    assert 1 not in output.logprobs
    exact = table[5].astype(np.float64) - np.log(np.exp(table[5].astype(np.float64)).sum())
    (record,) = output.logprobs[2]
    assert (record.token_id,) == output.sampled[2]
    assert record.logprob == pytest.approx(exact[record.token_id], abs=1e-4)
    assert record.rank == 1 + int((exact > exact[record.token_id]).sum())
    best = np.argsort(-exact, kind="stable")[:5]
    assert [token for token, _ in record.top] == best.tolist()
    np.testing.assert_allclose([value for _, value in record.top], exact[best], atol=1e-4)
    assert output.logprobs[3][0].top == ()


def test_alternatives_of_probability_zero_are_minus_infinity(make_driver: MakeDriver) -> None:
    driver = make_driver(known_table())
    driver.add(1, [2], params(logprobs=6))
    (record,) = driver.step().logprobs[1]
    assert [token for token, _ in record.top] == [1, 2, 3, 4, 0, 5]
    assert [value for _, value in record.top[4:]] == [-np.inf, -np.inf]
