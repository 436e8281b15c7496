"""Draws and scores against float64 formulas over a sorted vocabulary."""

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.kernels import ops
from octavo.kernels.reference import sampling
from octavo.kernels.sampling_args import SamplingFilters


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def _back_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything by the kernels of this machine, where it has some, and by plain torch."""
    with ops.reference_only() if request.param == "torch" else nullcontext():
        yield


def ranked(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Ids, best first, the lower one first on a tie."""
    return np.lexsort((np.arange(logits.size), -logits.astype(np.float64)))


def expected_filtered(
    logits: NDArray[np.float32], temperature: float, min_p: float, top_k: int, top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Surviving ids, best first, and their probabilities."""
    ids = ranked(logits)
    scaled = logits.astype(np.float64)[ids] / np.float64(np.float32(temperature))
    mass = np.exp(scaled - scaled[0])
    probabilities = mass / mass.sum()
    keep = (probabilities >= min_p * probabilities[0]) & (probabilities > 0)
    ids, probabilities = ids[keep], probabilities[keep] / probabilities[keep].sum()
    if top_k > 0:
        ids, probabilities = ids[:top_k], probabilities[:top_k]
        probabilities = probabilities / probabilities.sum()
    if top_p < 1:
        count = int(np.argmax(np.cumsum(probabilities) >= top_p)) + 1
        ids, probabilities = ids[:count], probabilities[:count]
        probabilities = probabilities / probabilities.sum()
    return ids, probabilities


def filters(rows: list[tuple[float, float, int, float]]) -> SamplingFilters:
    temperature, min_p, top_k, top_p = zip(*rows, strict=True)
    return SamplingFilters(
        torch.tensor(temperature),
        torch.tensor(min_p, dtype=torch.float64),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
    )


def spread(count: int) -> torch.Tensor:
    """Uniforms that cover [0, 1) evenly."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


@pytest.mark.parametrize("width", [1, 7, 255, 256, 257, 515, 1024])
def test_argmax_takes_the_lowest_of_equal_ids(width: int) -> None:
    logits = torch.zeros(3, width)
    logits[1, width // 2 :] = 2.0
    logits[2, width - 1] = 1.0
    values, ids = ops.argmax(logits)
    assert ids.tolist() == [0, width // 2, width - 1]
    assert values.tolist() == [0.0, 2.0, 1.0]


def test_argmax_gives_nan_for_rows_that_hold_it() -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(0))
    logits[1, 599] = torch.nan
    logits[2, 300] = torch.inf
    values, _ = ops.argmax(logits)
    assert torch.isfinite(values).tolist() == [True, False, False]
    assert torch.isnan(values).tolist() == [False, True, False]


@pytest.mark.parametrize("width", [5, 300, 515, 5000])
def test_draw_is_the_inverse_cdf_in_order_of_ids(width: int) -> None:
    rng = np.random.default_rng(width)
    logits = rng.normal(0, 3, (4, width)).astype(np.float32)
    rows = np.arange(200) % 4
    temperature = rng.uniform(0.3, 2, 200).astype(np.float32)
    uniforms = rng.uniform(size=200)
    ids = ops.draw(*map(torch.from_numpy, (logits, rows, temperature, uniforms)))
    for row, scale, uniform, drawn in zip(rows, temperature, uniforms, ids.tolist(), strict=True):
        mass = np.exp((logits[row].astype(np.float64) - logits[row].max()) / np.float64(scale))
        running = np.concatenate(([0.0], np.cumsum(mass / mass.sum())))
        # Weights are fp32: the target may lie an fp32 rounding beyond the token's own interval.
        assert running[drawn] - 1e-6 <= uniform <= running[drawn + 1] + 1e-6


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("width", [3, 256, 600])
def test_draws_never_take_an_impossible_token(uniform: float, width: int) -> None:
    logits = torch.full((2, width), -torch.inf)
    logits[0, 1] = 3.0
    logits[1, [1, width // 2]] = 1.0
    rows = torch.tensor([0, 1])
    uniforms = torch.full((2,), uniform, dtype=torch.float64)
    plain = ops.draw(logits, rows, torch.ones(2), uniforms)
    filtered = ops.draw_filtered(logits, rows, filters([(1.0, 0.0, 0, 0.999)] * 2), uniforms)
    for ids in (plain, filtered):
        assert ids[0] == 1
        assert ids[1] in (1, width // 2)


SETTINGS = [
    (1.0, 0.0, 2, 1.0),
    (0.7, 0.0, 0, 0.9),
    (1.0, 0.3, 0, 1.0),
    (2.0, 0.0, 300, 1.0),
    (2.0, 0.0, 300, 0.8),
    (1.5, 1e-5, 0, 0.99),
    (2.0, 1e-6, 0, 1.0),
    (0.5, 0.01, 40, 0.5),
    (1.0, 1.0, 0, 1.0),
    (1.0, 0.0, 1, 0.5),
    (1.0, 0.0, 0, 1e-9),
    (2.0, 0.0, 0, 0.999999),
    (2.0, 0.0, 4500, 0.99999),
]


@pytest.mark.parametrize("width", [10, 515, 6000])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_filters_compose_as_the_formulas_say(width: int, scale: float) -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, scale, (1, width)).astype(np.float32)
    draws = 64
    uniforms = spread(draws)
    for setting in SETTINGS:
        ids, probabilities = expected_filtered(logits[0], *setting)
        place = np.searchsorted(np.cumsum(probabilities), uniforms.numpy(), side="right")
        expected = ids[np.minimum(place, ids.size - 1)]
        drawn = ops.draw_filtered(
            torch.from_numpy(logits),
            torch.zeros(draws, dtype=torch.int64),
            filters([setting] * draws),
            uniforms,
        )
        assert drawn.tolist() == expected.tolist(), setting


@pytest.mark.parametrize("width", [8, 300, 5000])
def test_top_k_and_top_p_cut_ties_at_the_lowest_ids(width: int) -> None:
    logits = torch.zeros(1, width)
    logits[0, width - 1] = 1.0
    uniforms = spread(50)
    zeros = torch.zeros(50, dtype=torch.int64)
    for setting in ((1.0, 0.0, 4, 1.0), (1.0, 0.0, 4, 0.9999)):
        drawn = ops.draw_filtered(logits, zeros, filters([setting] * 50), uniforms)
        assert set(drawn.tolist()) == {width - 1, 0, 1, 2}
    equal = torch.zeros(1, width)
    drawn = ops.draw_filtered(equal, zeros, filters([(1.0, 0.0, 0, 2 / width)] * 50), uniforms)
    assert set(drawn.tolist()) == {0, 1}


def test_filtered_draws_do_not_depend_on_company() -> None:
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0, 1, (len(SETTINGS), 5000)).astype(np.float32))
    uniforms = torch.from_numpy(rng.uniform(size=len(SETTINGS)))
    together = ops.draw_filtered(logits, torch.arange(len(SETTINGS)), filters(SETTINGS), uniforms)
    for row, setting in enumerate(SETTINGS):
        alone = ops.draw_filtered(
            logits[row : row + 1], torch.tensor([0]), filters([setting]), uniforms[row : row + 1]
        )
        assert alone.tolist() == [together[row].item()]


@pytest.mark.parametrize("width", [6, 515, 3000])
def test_scores_are_the_log_softmax_with_ranks_and_best_ids(width: int) -> None:
    rng = np.random.default_rng(width)
    logits = rng.normal(0, 3, (5, width)).astype(np.float32)
    logits[3] = np.round(logits[3])
    logits[4, width // 2] = -np.inf
    token_ids = np.array([0, width - 1, 2, 3, width // 2])
    scored = ops.score_tokens(torch.from_numpy(logits), torch.from_numpy(token_ids), 5)
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(scored.logprobs, exact[range(5), token_ids], atol=1e-5)
    for row, token in enumerate(token_ids):
        best = ranked(logits[row])
        assert scored.top_ids[row].tolist() == best[:5].tolist()
        assert scored.ranks[row] == 1 + best.tolist().index(token)
        np.testing.assert_allclose(scored.top_logprobs[row], exact[row, best[:5]], atol=1e-5)


def test_scores_without_alternatives_or_with_more_than_the_vocabulary() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0]])
    assert ops.score_tokens(logits, torch.tensor([2]), 0).top_ids.shape == (1, 0)
    scored = ops.score_tokens(logits, torch.tensor([2]), 20)
    assert scored.top_ids.tolist() == [[1, 2, 0]]
    assert scored.ranks.tolist() == [2]


@pytest.mark.parametrize("slice_elements", [1, 2 * 700, 10**6])
def test_scores_on_a_device_do_not_depend_on_the_slices(
    monkeypatch: pytest.MonkeyPatch, slice_elements: int
) -> None:
    monkeypatch.setattr(sampling, "_CPU_SLICE", slice_elements)
    generator = torch.Generator().manual_seed(3)
    # Coarse values, so that some are equal.
    logits = torch.randn(5, 700, generator=generator).mul(4).round().div(4)
    token_ids = torch.tensor([0, 699, 5, 17, 300])
    wanted = ops.score_tokens(logits, token_ids, 6)
    scored = ops.score_on_device(logits, token_ids, 6)
    torch.testing.assert_close(scored.logprobs, wanted.logprobs)
    torch.testing.assert_close(scored.top_logprobs, wanted.top_logprobs)
    assert torch.equal(scored.ranks, wanted.ranks)
    assert torch.equal(scored.top_ids, wanted.top_ids)
