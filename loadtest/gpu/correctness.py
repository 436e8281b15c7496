"""Kernels in the model's precision against float64."""

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.sampling_args import SamplingFilters
from octavo.kernels.seeded_args import SeededDraws
from octavo.loadtest.gpu.inputs import BLOCK_SIZE, Case, cases_of, make_case
from octavo.loadtest.gpu.shapes import Plan

# Largest error over the largest value: the rounding of the result and of the weights before the
# second product, twice over.
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def exact_attention(case: Case, window: int | None) -> Tensor:
    """float64 [T, Hq, D], sequence by sequence over its own keys."""
    results = []
    starts = case.batch.query_start_loc.tolist()
    cache = case.cache
    group = case.q.shape[1] // cache.key.shape[1]
    meant = [_meant(cache.key, cache.key_scale), _meant(cache.value, cache.value_scale)]
    for row, length in enumerate(case.batch.seq_lens.tolist()):
        table = case.batch.block_tables[row, : -(-length // BLOCK_SIZE)].long()
        keys, values = (
            tensor[table]
            .transpose(0, 1)
            .flatten(1, 2)[:, :length]
            .double()
            .repeat_interleave(group, 0)
            for tensor in meant
        )
        q = case.q[starts[row] : starts[row + 1]].double().transpose(0, 1)
        places = torch.arange(length, device=q.device)
        positions = places[length - q.shape[1] :, None]
        seen = places <= positions
        if window is not None:
            seen &= places > positions - window
        scores = (q @ keys.mT * case.scale).masked_fill(~seen, -torch.inf)
        results.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(results)


def _meant(cache: Tensor, scale: Tensor | None) -> Tensor:
    return cache if scale is None else cache.double() * scale.double()[:, None, None]


def check_kernels(plan: Plan) -> Iterator[tuple[str, float, float]]:
    """(name, error, limit) of each check."""
    dtype = getattr(torch, plan.dtype)
    limit = LIMITS[dtype]
    for heads in plan.checked_heads:
        for query_len in (1, 7, 33):
            for window in (None, 24):
                case = make_case([33, 48, 129, 600], query_len, heads, plan.device, dtype)
                name = f"attention {heads.query}/{heads.kv}/{heads.size} q{query_len} w{window}"
                for kind, each in cases_of(plan, case):
                    error = _error(each.attend(window), exact_attention(each, window))
                    yield name + kind, error, limit
    yield from _check_rows(plan, dtype, limit)
    yield from _check_draws(plan)


def _error(actual: Tensor, exact: Tensor) -> float:
    error = (actual.double() - exact).abs().max() / exact.abs().max()
    return float("inf") if bool(error.isnan()) else float(error)


def _check_rows(plan: Plan, dtype: torch.dtype, limit: float) -> Iterator[tuple[str, float, float]]:
    columns, depth = plan.linear_shape
    generator = torch.Generator(plan.device).manual_seed(0)
    x, weight = (
        torch.randn(rows, depth, generator=generator, device=plan.device).to(dtype)
        for rows in (max(plan.linear_rows), columns)
    )
    scale = weight[0]
    exact = x.double()
    norm = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale.double()
    yield "rms norm", _error(ops.rms_norm(x, scale, 1e-5), norm), limit
    half = depth // 2
    gated = torch.nn.functional.silu(exact[:, :half]) * exact[:, half:]
    yield "silu", _error(ops.silu_and_mul(x), gated), limit
    packed = ops.pack_linear(weight)
    for rows in plan.linear_rows:
        product = exact[:rows] @ weight.double().T
        yield f"linear {rows}", _error(ops.linear(x[:rows], packed), product), limit


def _check_draws(plan: Plan) -> Iterator[tuple[str, float, float]]:
    """Draws and cuts equal those of the twin; the share of rows that differ is the error."""
    count, width = 16, plan.models[0].vocab_size
    generator = torch.Generator(plan.device).manual_seed(1)
    logits = 4 * torch.randn(count, width, generator=generator, device=plan.device)
    rows = torch.arange(count, device=plan.device)
    temperature = torch.linspace(0.3, 1.5, count, device=plan.device)
    filters = SamplingFilters(
        temperature,
        torch.full((count,), 0.001, dtype=torch.float64, device=plan.device),
        torch.full((count,), 40, dtype=torch.int64, device=plan.device),
        torch.linspace(0.5, 1.0, count, dtype=torch.float64, device=plan.device),
    )
    draws = SeededDraws(rows, temperature, rows * 7919 + 1)
    ids = ops.draw_seeded(logits, draws, ops.find_cutoff(logits, rows, filters))
    with ops.reference_only():
        wanted = ops.draw_seeded(logits, draws, ops.find_cutoff(logits, rows, filters))
    # Noise of another logarithm may turn a tie; more than one of 16 is no tie.
    yield "draws", float((ids != wanted).double().mean()), 1.5 / count
