"""Penalties, filters and draws against their twins."""

import torch
from torch import Tensor

from octavo.kernels import reference, triton
from octavo.kernels.sampling_args import SamplingFilters
from octavo.kernels.seeded_args import Penalties, SeededDraws, TokenCounts

SIZE = 2500


def random_logits(rows: int, size: int = SIZE) -> Tensor:
    return 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(0))


def filters(*rows: tuple[float, float, int, float]) -> SamplingFilters:
    """Rows of (temperature, min_p, top_k, top_p)."""
    temperature, min_p, top_k, top_p = zip(*rows, strict=True)
    return SamplingFilters(
        torch.tensor(temperature),
        torch.tensor(min_p, dtype=torch.float64),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
    )


def survivors(logits: Tensor, rows: Tensor, chosen: SamplingFilters, module: object) -> Tensor:
    """bool [N, V]."""
    cut = module.find_cutoff(logits, rows, chosen)  # type: ignore[attr-defined]
    picked = logits[rows]
    ids = torch.arange(logits.shape[1])
    value, last = cut.value[:, None], cut.last_id[:, None]
    return (picked > value) | ((picked == value) & (ids <= last))


FILTERS = filters(
    (1.0, 0.0, 0, 1.0),
    (1.0, 0.0, 1, 1.0),
    (0.7, 0.0, 50, 1.0),
    (1.3, 0.0, SIZE + 5, 1.0),
    (1.0, 0.0, 0, 0.9),
    (2.0, 0.0, 0, 0.999),
    (0.5, 0.0, 0, 1e-9),
    (1.0, 0.05, 0, 1.0),
    (1.5, 0.01, 100, 0.8),
    (1.0, 0.3, 100, 0.99),
)


def test_filters_leave_the_same_tokens() -> None:
    logits = random_logits(3)
    rows = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    ours, theirs = (survivors(logits, rows, FILTERS, module) for module in (triton, reference))
    assert torch.equal(ours, theirs)


def test_of_equal_logits_the_lower_ids_stay() -> None:
    # Seven values only, zeros of both signs among them, so every border falls into a tie.
    logits = torch.randint(-3, 4, (1, 1200), generator=torch.Generator().manual_seed(0)).float()
    logits[0, ::7] *= -1.0
    chosen = filters(
        (1.0, 0.0, 1, 1.0), (1.0, 0.0, 400, 1.0), (1.0, 0.0, 0, 0.3), (1.0, 0.0, 0, 0.95),
        (3.0, 0.0, 600, 0.77), (1.0, 0.13, 300, 0.97),
    )  # fmt: skip
    rows = torch.zeros(6, dtype=torch.int64)
    ours, theirs = (survivors(logits, rows, chosen, module) for module in (triton, reference))
    assert torch.equal(ours, theirs)


def test_masked_tokens_never_survive() -> None:
    logits = torch.full((2, 1500), -torch.inf)
    logits[0, [7, 1400, 900]] = torch.tensor([1.0, 2.0, 1.5])
    logits[1, 3] = -80.0
    chosen = filters((1.0, 0.0, 50, 1.0), (1.0, 0.0, 0, 0.99), (1.0, 0.0, 1400, 0.5))
    kept = survivors(logits, torch.tensor([0, 0, 1]), chosen, triton)
    assert [row.nonzero().flatten().tolist() for row in kept] == [
        [7, 900, 1400],
        [7, 900, 1400],
        [3],
    ]


def draws(rows: list[int], temperature: list[float], seed: int = 0) -> SeededDraws:
    generator = torch.Generator().manual_seed(seed)
    streams = torch.randint(-(2**63), 2**63 - 1, (len(rows),), generator=generator)
    return SeededDraws(torch.tensor(rows), torch.tensor(temperature), streams)


def test_draws_equal_the_twins() -> None:
    logits = random_logits(4, 5000)
    batch = draws([0, 1, 2, 3, 0, 0, 2, 1], [1.0, 0.5, 0.0, 2.0, 1.0, 5.0, 0.1, 0.0])
    assert torch.equal(
        triton.draw_seeded(logits, batch, None), reference.draw_seeded(logits, batch, None)
    )


def test_filtered_draws_equal_the_twins() -> None:
    logits = random_logits(3)
    rows = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    batch = SeededDraws(rows, FILTERS.temperature, draws([0] * 10, [0.0] * 10).streams)
    cut = reference.find_cutoff(logits, rows, FILTERS)
    out = triton.draw_seeded(logits, batch, cut)
    assert torch.equal(out, reference.draw_seeded(logits, batch, cut))
    assert survivors(logits, rows, FILTERS, reference).gather(1, out[:, None]).all()


def test_a_draw_alone_and_in_company_is_the_same() -> None:
    logits = random_logits(4, 5000)
    batch = draws([3, 0, 2, 1], [1.0, 0.9, 1.1, 1.2])
    together = triton.draw_seeded(logits, batch, None)
    for place in range(4):
        row = int(batch.rows[place])
        alone = SeededDraws(
            torch.tensor([0]),
            batch.temperature[place : place + 1],
            batch.streams[place : place + 1],
        )
        assert triton.draw_seeded(logits[row : row + 1], alone, None)[0] == together[place]


def test_greedy_takes_the_lowest_of_the_best() -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [4099, 4100, 8500]] = 2.0
    assert triton.draw_seeded(logits, draws([0], [0.0]), None).tolist() == [4099]


def test_draws_follow_the_softmax() -> None:
    # The twin, whose noise is the kernel's: frequencies of 40,000 draws against probabilities.
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -3.0]])
    count = 40_000
    out = reference.draw_seeded(logits, draws([0] * count, [1.5] * count), None)
    expected = torch.softmax(logits[0].double() / 1.5, 0)
    deviation = (expected * (1 - expected) / count).sqrt()
    found = torch.bincount(out, minlength=5) / count
    assert ((found - expected).abs() < 4 * deviation).all()


def test_penalties() -> None:
    size = 4500
    logits = random_logits(5, size)
    logits[4, :3] = torch.tensor([3e38, -1e-3, 2.0])
    generator = torch.Generator().manual_seed(1)
    # Rows of logits look into tables of another length, in any order.
    outputs = torch.randint(-3, 3, (7, size), generator=generator).clamp(min=0).short()
    outputs[0, :9] = 32767
    bits = torch.randint(-(2**31), 2**31 - 1, (7, 141), generator=generator).int()
    counts = TokenCounts(torch.tensor([6, 0, 3, 2, 5]), bits, outputs)
    penalties = Penalties(
        torch.tensor([1.0, 1.7, 1.0, 0.8, 1e-6]),
        torch.tensor([0.0, 0.5, -0.3, 0.0, 0.0]),
        torch.tensor([0.0, 0.0, 1.1, 0.0, 0.0]),
    )
    ours, theirs = logits.clone(), logits.clone()
    triton.penalize(ours, counts, penalties)
    reference.penalize(theirs, counts, penalties)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours[0], logits[0])
    assert ours.isfinite().all()


def test_log_sum_exp() -> None:
    logits = torch.cat((random_logits(2, 5000), torch.full((2, 5000), -torch.inf)))
    logits[2, 4500] = -200.0
    torch.testing.assert_close(triton.log_sum_exp(logits), reference.log_sum_exp(logits))
