"""Bias, penalties and masks of one row of logits, against float64 formulas."""

import numpy as np
import pytest
import torch

from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.worker.adjustments import make_adjustments

V = 30
EOS = (28, 29)


def adjusted(
    logits: np.ndarray, prompt: list[int], output: list[int], **params: object
) -> np.ndarray:
    wanted = SamplingParams(max_tokens=50, **params)  # type: ignore[arg-type]
    adjustments = make_adjustments(wanted, EOS, V, torch.device("cpu"))
    assert adjustments is not None
    row = torch.from_numpy(logits.astype(np.float32).copy())
    if adjustments.applies(len(output)):
        adjustments.apply(row, np.array(prompt, np.int32), np.array(output, np.int32))
    return row.numpy()


def masked(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.isneginf(row)).tolist())


@pytest.mark.parametrize("seed", range(20))
def test_d04_bias_and_penalties_follow_the_formulas(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, V).astype(np.float32)
    prompt, output = rng.integers(0, V, 12).tolist(), rng.integers(0, V, 9).tolist()
    presence, frequency = rng.uniform(-2, 2, 2)
    repetition = rng.uniform(0.5, 2)
    bias = {3: 2.5, 7: -4.0}
    expected = logits.astype(np.float64)
    for token, value in bias.items():
        expected[token] += value
    for token in set(prompt) | set(output):
        expected[token] *= 1 / repetition if expected[token] > 0 else repetition
    for token in set(output):
        expected[token] -= frequency * output.count(token) + presence
    row = adjusted(
        logits,
        prompt,
        output,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
    )
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_extreme_repetition_penalties_stay_usable(penalty: float) -> None:
    row = adjusted(
        np.array([5.0, -5.0, 0.0] + [1.0] * (V - 3)), [0, 1, 2], [], repetition_penalty=penalty
    )
    assert not np.isnan(row).any()
    assert np.isfinite(row.max())


def test_d06_min_tokens_masks_all_ends_until_enough_are_generated() -> None:
    logits = np.zeros(V)
    params = {"min_tokens": 3, "stop_token_ids": (5, 4_000_000)}
    assert masked(adjusted(logits, [1] * 10, [], **params)) == {5, 28, 29}
    assert masked(adjusted(logits, [1] * 10, [2, 2], **params)) == {5, 28, 29}
    assert masked(adjusted(logits, [1] * 10, [2, 2, 2], **params)) == set()


def test_d06_ignore_eos_masks_nothing() -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    assert make_adjustments(params, EOS, V, torch.device("cpu")) is None


def test_masks_come_after_the_bias() -> None:
    row = adjusted(np.zeros(V), [], [], logit_bias={28: 100.0, 3: 100.0}, min_tokens=1)
    assert np.isneginf(row[28])
    assert row[3] == 100


def test_only_allowed_ids_remain() -> None:
    logits = np.arange(V, dtype=np.float64)
    row = adjusted(logits, [], [], allowed_token_ids=(4, 9, 4, 99))
    assert masked(row) == set(range(V)) - {4, 9}
    assert (row[4], row[9]) == (4, 9)


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], {7}), ([3], {7, 4}), ([3, 4], {7, 5}), ([4, 3], {7, 4}), ([4], {7})],
)
def test_bad_words_ban_the_token_that_completes_one(output: list[int], banned: set[int]) -> None:
    words = ((7,), (3, 4), (3, 4, 5))
    # The prompt ends in the head of a bad word: what it completes would not be all generated.
    assert masked(adjusted(np.zeros(V), [1, 3], output, bad_words_token_ids=words)) == banned


def test_a_request_without_adjustments_sends_nothing_to_the_device() -> None:
    nowhere = torch.device("cuda", 99)
    params = SamplingParams(max_tokens=5, temperature=0.5, stop_token_ids=(3,), logit_bias={V: 1.0})
    assert make_adjustments(params, EOS, V, nowhere) is None
