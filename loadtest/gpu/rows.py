"""The small kernels of a decode step against the bandwidth: they read and write rows, no more."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.rotary_args import Rotation
from octavo.kernels.sampling_args import SamplingFilters
from octavo.kernels.seeded_args import SeededDraws
from octavo.loadtest.gpu.inputs import BLOCK_SIZE
from octavo.loadtest.gpu.shapes import Plan
from octavo.loadtest.gpu.speed import Figure, bytes_figure, num_copies, seconds_of
from octavo.loadtest.offline.ceilings import Ceilings

Work = Callable[[], object]


def measure_rows(plan: Plan, ceilings: Ceilings) -> Iterator[Figure]:
    """Norm, activation, rotation and draws of as many rows as the largest batch has."""
    rows = max(plan.model_batches)
    makers: dict[str, Callable[[Plan, int], tuple[Work, int]]] = {
        "norm": _norm,
        "silu": _silu,
        "rotate, cache": _rotate,
        "draw": _draw,
        "draw top-k, top-p": partial(_draw, filtered=True),
        "scores": _scores,
    }
    for name, make in makers.items():
        first, moved = make(plan, rows)
        works = [first, *(make(plan, rows)[0] for _ in range(num_copies(plan, moved) - 1))]
        yield bytes_figure(f"{name} {rows}", seconds_of(plan, works), moved, ceilings)


def _random(plan: Plan, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    wanted = getattr(torch, plan.dtype) if dtype is None else dtype
    return torch.randn(shape, device=plan.device).to(wanted)


def _norm(plan: Plan, rows: int) -> tuple[Work, int]:
    size = plan.models[0].hidden_size
    x, residual = _random(plan, rows, size), _random(plan, rows, size)
    return partial(ops.add_rms_norm, x, residual, x[0], 1e-5), 4 * x.nbytes


def _silu(plan: Plan, rows: int) -> tuple[Work, int]:
    gate_up = _random(plan, rows, 2 * plan.models[0].intermediate_size)
    return partial(ops.silu_and_mul, gate_up), gate_up.nbytes * 3 // 2


def _rotate(plan: Plan, rows: int) -> tuple[Work, int]:
    heads = plan.heads
    qkv = _random(plan, rows, heads.query + 2 * heads.kv, heads.size)
    q, k, v = torch.split(qkv, [heads.query, heads.kv, heads.kv], dim=1)
    blocks = -(-rows // BLOCK_SIZE)
    cache = PagedCache(*(_random(plan, blocks, heads.kv, BLOCK_SIZE, heads.size) for _ in range(2)))
    places = torch.arange(rows, device=plan.device)
    rotation = Rotation(places, _random(plan, rows, heads.size, dtype=torch.float32))
    return partial(ops.rotate_and_cache, q, k, v, None, rotation, cache, places), 2 * qkv.nbytes


def _draw(plan: Plan, rows: int, filtered: bool = False) -> tuple[Work, int]:
    logits = _logits(plan, rows)
    index = torch.arange(rows, device=plan.device)
    temperature = torch.ones(rows, device=plan.device)
    double = temperature.double()
    draws = SeededDraws(index, temperature, index * 7919)
    filters = SamplingFilters(
        temperature,
        double * 0,
        index * 0 + (20 if filtered else 0),
        double * (0.95 if filtered else 1.0),
    )

    def draw() -> Tensor:
        return ops.draw_seeded(logits, draws, ops.find_cutoff(logits, index, filters))

    return draw, logits.nbytes


def _scores(plan: Plan, rows: int) -> tuple[Work, int]:
    logits = _logits(plan, rows)
    ids = torch.zeros(rows, dtype=torch.int64, device=plan.device)
    return partial(ops.score_on_device, logits, ids, 5), logits.nbytes


def _logits(plan: Plan, rows: int) -> Tensor:
    return 4 * _random(plan, rows, plan.models[-1].vocab_size, dtype=torch.float32)
