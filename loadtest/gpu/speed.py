"""Kernels and torch's own against what the device can move and multiply, measured in one run."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from octavo.kernels import ops
from octavo.loadtest.gpu.inputs import Case, cases_of, make_case
from octavo.loadtest.gpu.shapes import Plan
from octavo.loadtest.offline.ceilings import Ceilings
from octavo.loadtest.offline.clock import best_seconds

_logger = logging.getLogger(__name__)


class Figure(NamedTuple):
    """One measurement: what it reached, in `unit`, and its share of the ceiling."""

    name: str
    microseconds: float
    reached: float
    unit: str
    share: float


def measure_kernels(plan: Plan, ceilings: Ceilings) -> Iterator[Figure]:
    """Decode and prefill attention with torch's beside it, and the linear layers."""
    for batch in plan.decode_batches:
        for context in plan.contexts:
            yield from _measure_decode(plan, batch, context, ceilings)
    for length in plan.prompts:
        yield from _measure_prefill(plan, length, ceilings)
    yield from _measure_linear(plan, ceilings)


def seconds_of(plan: Plan, works: Sequence[Callable[[], object]]) -> float:
    """Seconds of a call; `works` are the same call on different inputs, and take turns.

    On a GPU they are recorded and repeated: else small kernels would be done before the host has
    started the next, and the host would be measured.
    """
    turns = [*works] * -(-plan.calls // len(works))
    device = torch.device(plan.device)
    if device.type == "cpu":
        turn = cycle(turns)
        return best_seconds(lambda: next(turn)(), device, plan.repeats, len(turns))
    for work in works:
        # Compiles, or says that it cannot, which must not happen in a recording.
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in turns:
            work()
    return best_seconds(graph.replay, device, plan.repeats) / len(turns)


def num_copies(plan: Plan, num_bytes: int) -> int:
    """How many inputs of this size have to take turns."""
    return -(-plan.flush_bytes // num_bytes)


def decode_bytes(plan: Plan, batch: int, context: int, itemsize: int) -> int:
    """Keys and values that a decode step of one layer reads."""
    return 2 * batch * context * plan.heads.kv * plan.heads.size * itemsize


def prefill_operations(plan: Plan, length: int) -> float:
    """Multiplications and additions of causal attention of one layer."""
    return 4 * plan.heads.query * plan.heads.size * length * (length + 1) / 2


def bytes_figure(name: str, seconds: float, moved: float, ceilings: Ceilings) -> Figure:
    """Of a call that moves so many bytes."""
    rate = moved / seconds / 1e9
    return Figure(name, seconds * 1e6, rate, "GB/s", rate / ceilings.copy_gb)


def operations_figure(name: str, seconds: float, work: float, ceilings: Ceilings) -> Figure:
    """Of a call that does so much work."""
    rate = work / seconds / 1e12
    return Figure(name, seconds * 1e6, rate, "TFLOP/s", rate * 1e3 / ceilings.matmul_gflops)


def _measure_decode(plan: Plan, batch: int, context: int, ceilings: Ceilings) -> Iterator[Figure]:
    itemsize = getattr(torch, plan.dtype).itemsize
    moved = decode_bytes(plan, batch, context, itemsize)
    copies = range(num_copies(plan, moved))
    kinds: dict[str, list[Case]] = {}
    for _ in copies:
        for kind, case in cases_of(plan, decode_case(plan, batch, context)):
            kinds.setdefault(kind, []).append(case)
    for kind, cases in kinds.items():
        took = seconds_of(plan, [case.attend for case in cases])
        read = moved // itemsize * cases[0].cache.key.dtype.itemsize
        yield bytes_figure(f"decode {batch} x {context}{kind}", took, read, ceilings)
    kinds.clear()
    heads = [_heads(plan, batch, 1, context) for _ in copies]
    name, works = f"  torch SDPA {batch} x {context}", [partial(_sdpa, *each) for each in heads]
    yield from _peer(lambda: bytes_figure(name, seconds_of(plan, works), moved, ceilings))


def decode_case(plan: Plan, batch: int, context: int) -> Case:
    """Sequences of `context` tokens that decode one more."""
    dtype = getattr(torch, plan.dtype)
    return make_case([context] * batch, 1, plan.heads, plan.device, dtype)


def prefill_case(plan: Plan, length: int) -> Case:
    """A whole prompt."""
    return make_case([length], length, plan.heads, plan.device, getattr(torch, plan.dtype))


def _measure_prefill(plan: Plan, length: int, ceilings: Ceilings) -> Iterator[Figure]:
    work = prefill_operations(plan, length)
    for kind, case in cases_of(plan, prefill_case(plan, length)):
        took = seconds_of(plan, [case.attend])
        yield operations_figure(f"prefill {length}{kind}", took, work, ceilings)
    heads = _heads(plan, 1, length, length)
    sdpa = partial(_sdpa, *heads, causal=True)

    def figure(peer: str, work_of: Callable[[], object]) -> Figure:
        took = seconds_of(plan, [work_of])
        return operations_figure(f"  torch {peer} {length}", took, work, ceilings)

    yield from _peer(lambda: figure("SDPA", sdpa))
    yield from _peer(lambda: figure("flex", _flex(plan, heads, length)))


def _peer(measure: Callable[[], Figure]) -> Iterator[Figure]:
    """What is measured beside ours; that it fails on a device must not cost our own figures."""
    try:
        yield measure()
    except RuntimeError:  # that of memory, of a compiler and of a device among them
        _logger.exception("a peer could not be measured")


def _heads(plan: Plan, batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype, heads = getattr(torch, plan.dtype), plan.heads
    q = torch.randn(batch, heads.query, queries, heads.size, device=plan.device).to(dtype)
    k, v = (
        torch.randn(batch, heads.kv, keys, heads.size, device=plan.device).to(dtype)
        for _ in range(2)
    )
    return q, k, v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _flex(plan: Plan, heads: tuple[Tensor, Tensor, Tensor], length: int) -> Callable[[], object]:
    """Flex attention with its mask of blocks; compiled where there is a GPU to compile for."""

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, length, length, device=plan.device)
    attend = torch.compile(flex_attention) if plan.device == "cuda" else flex_attention
    return partial(attend, *heads, block_mask=mask, enable_gqa=True)


def _measure_linear(plan: Plan, ceilings: Ceilings) -> Iterator[Figure]:
    dtype, (columns, depth) = getattr(torch, plan.dtype), plan.linear_shape
    weights = [torch.randn(columns, depth, device=plan.device).to(dtype) for _ in range(plan.calls)]
    packed = [ops.pack_linear(weight) for weight in weights]
    for rows in plan.linear_rows:
        x = torch.randn(rows, depth, device=plan.device).to(dtype)
        kinds: dict[str, list[Callable[[], Any]]] = {
            f"linear {rows}": [partial(ops.linear, x, weight) for weight in packed],
            f"  torch linear {rows}": [partial(F.linear, x, weight) for weight in weights],
        }
        for name, works in kinds.items():
            took = seconds_of(plan, works)
            yield bytes_figure(name, took, weights[0].nbytes, ceilings)
