"""Kernels against what the device can move and multiply, measured in the same run."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from octavo.kernels import ops
from octavo.loadtest.gpu.inputs import Case, make_case, seconds
from octavo.loadtest.gpu.shapes import Plan


class Ceilings(NamedTuple):
    """Bytes per second of a copy, read and written, and floating point operations per second."""

    bandwidth: float
    compute: float


class Figure(NamedTuple):
    """One measurement: what it reached, in `unit`, and its share of the ceiling."""

    name: str
    microseconds: float
    reached: float
    unit: str
    share: float


def measure_ceilings(plan: Plan) -> Ceilings:
    """Of random data: zeros would draw less power and run faster."""
    dtype = getattr(torch, plan.dtype)
    source = torch.randn(plan.copy_bytes // dtype.itemsize, device=plan.device).to(dtype)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), plan.device, plan.repeats)
    size = 8192 if plan.device == "cuda" else 128
    a, b = (torch.randn(size, size, device=plan.device).to(dtype) for _ in range(2))
    product = seconds(lambda: a @ b, plan.device, plan.repeats)
    return Ceilings(2 * source.nbytes / copy, 2 * size**3 / product)


def measure_kernels(plan: Plan, ceilings: Ceilings) -> Iterator[Figure]:
    """Decode and prefill attention with torch's beside it, and the linear layers."""
    dtype = getattr(torch, plan.dtype)
    for batch in plan.decode_batches:
        for context in plan.contexts:
            case = make_case([context] * batch, 1, plan.heads, plan.device, dtype)
            moved = 2 * batch * context * plan.heads.kv * plan.heads.size * dtype.itemsize
            yield _bytes(f"decode {batch} x {context}", _attend(plan, case), moved, ceilings)
    for length in plan.prompts:
        case = make_case([length], length, plan.heads, plan.device, dtype)
        work = 4 * plan.heads.query * plan.heads.size * length * (length + 1) / 2
        yield _operations(f"prefill {length}", _attend(plan, case), work, ceilings)
        yield _operations(f"  torch SDPA {length}", _sdpa(plan, length), work, ceilings)
    yield from _measure_linear(plan, ceilings)


def _attend(plan: Plan, case: Case) -> float:
    return seconds(
        lambda: ops.paged_attention(
            case.q, case.key_cache, case.value_cache, case.batch, case.scale
        ),
        plan.device,
        plan.repeats,
    )


def _sdpa(plan: Plan, length: int) -> float:
    dtype, heads = getattr(torch, plan.dtype), plan.heads
    q, k, v = (
        torch.randn(1, count, length, heads.size, device=plan.device).to(dtype)
        for count in (heads.query, heads.kv, heads.kv)
    )
    return seconds(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        plan.device,
        plan.repeats,
    )


def _measure_linear(plan: Plan, ceilings: Ceilings) -> Iterator[Figure]:
    dtype, (columns, depth) = getattr(torch, plan.dtype), plan.linear_shape
    # Several weights in turn, so that none is still in the cache.
    weights = [torch.randn(columns, depth, device=plan.device).to(dtype) for _ in range(8)]
    packed = [ops.pack_linear(weight) for weight in weights]
    for rows in plan.linear_rows:
        x = torch.randn(rows, depth, device=plan.device).to(dtype)
        ours = seconds(
            partial(_apply_all, partial(ops.linear, x), packed), plan.device, plan.repeats
        )
        library = seconds(
            partial(_apply_all, partial(F.linear, x), weights), plan.device, plan.repeats
        )
        moved = len(weights) * weights[0].nbytes
        yield _bytes(f"linear {rows}", ours, moved, ceilings)
        yield _bytes(f"  torch linear {rows}", library, moved, ceilings)


def _apply_all(product: Callable[[Any], object], weights: Sequence[Any]) -> None:
    for weight in weights:
        product(weight)


def _bytes(name: str, time: float, moved: float, ceilings: Ceilings) -> Figure:
    rate = moved / time
    return Figure(name, time * 1e6, rate / 1e9, "GB/s", rate / ceilings.bandwidth)


def _operations(name: str, time: float, work: float, ceilings: Ceilings) -> Figure:
    rate = work / time
    return Figure(name, time * 1e6, rate / 1e12, "TFLOP/s", rate / ceilings.compute)
