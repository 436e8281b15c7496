# ruff: noqa: ANN401  # Numba has no types
"""Drawing tokens from rows of logits, one draw a chunk of work, without sorting the vocabulary.

As `kernels.reference.sampling`, whose rules hold. A filtered draw looks only at tokens whose weight
is above a bound, which is lowered until the filters can be decided; those lie in a heap, from
which the best are taken one by one. Sums over whole rows add float32 weights in float64.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu.compiled import Kernel, inlined
from octavo.kernels.cpu.intrinsics import (
    keep_alive,
    largest_f32,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    store_f32,
    store_f64,
    store_i64,
)
from octavo.kernels.cpu.math import exp
from octavo.kernels.cpu.pool import shared_pool
from octavo.kernels.sampling_args import SamplingFilters

_BLOCK = 256
_LEAST = np.float32(-87)  # below, a weight is 0
_FIRST_DEPTH = np.float32(8)
_ZERO = np.float32(0)
_MINUS_INFINITY, _NAN = np.float32(-np.inf), np.float32(np.nan)
_ID_MASK = 0xFFFFFFFF

# The kernels' arguments, in this order; from `_OUT` on, one number for each draw.
(
    _LOGITS,
    _STRIDE,
    _WIDTH,
    _OUT,
    _UNIFORMS,
    _ROWS,
    _TEMPERATURE,
    _MIN_P,
    _TOP_K,
    _TOP_P,
) = range(10)
# In place of the uniforms, where nothing is drawn.
_BEST = _UNIFORMS


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.ops.argmax`."""
    rows, width = logits.shape
    best, ids = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    arguments = (logits.data_ptr(), logits.stride(0), width, ids.data_ptr(), best.data_ptr())
    shared_pool().run(_argmax, rows, *arguments, long=True)
    return best, ids


def draw(logits: Tensor, rows: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    """See `octavo.kernels.ops.draw`."""
    ids = torch.empty_like(rows)
    # These may be copies, to be kept until the run is over.
    settings = [x.contiguous() for x in (uniforms, rows, temperature)]
    addresses = [x.data_ptr() for x in (ids, *settings)]
    arguments = (logits.data_ptr(), logits.stride(0), logits.shape[1], *addresses)
    shared_pool().run(_draw, rows.shape[0], *arguments, long=True)
    return ids


def draw_filtered(
    logits: Tensor, rows: Tensor, filters: SamplingFilters, uniforms: Tensor
) -> Tensor:
    """See `octavo.kernels.ops.draw_filtered`."""
    ids = torch.empty_like(rows)
    given = (uniforms, rows, filters.temperature, filters.min_p, filters.top_k, filters.top_p)
    settings = [x.contiguous() for x in given]
    addresses = [x.data_ptr() for x in (ids, *settings)]
    arguments = (logits.data_ptr(), logits.stride(0), logits.shape[1], *addresses)
    shared_pool().run(_draw_filtered, rows.shape[0], *arguments, long=True)
    return ids


@inlined
def _row(a: int, draw_number: int) -> int:
    row = load_i64(load_i64(a, _ROWS), draw_number)
    address: int = load_i64(a, _LOGITS) + 4 * row * load_i64(a, _STRIDE)
    return address


@inlined
def _weight(logit: np.float32, best: np.float32, temperature: np.float32) -> np.float32:
    exponent = (logit - best) / temperature
    weight: np.float32 = exp(exponent) if exponent >= _LEAST else _ZERO
    return weight


@inlined
def _weigh_block(
    row: int, begin: int, end: int, best: np.float32, temperature: np.float32
) -> float:
    total = 0.0
    for i in range(begin, end):
        total += np.float64(_weight(load_f32(row, i), best, temperature))
    return total


def _argmax_kernel(a: Any, chunk: Any) -> None:
    """The best of one row, and the first of its ids."""
    width = load_i64(a, _WIDTH)
    row = load_i64(a, _LOGITS) + 4 * chunk * load_i64(a, _STRIDE)
    best, block = _MINUS_INFINITY, 0
    for begin in range(0, width, _BLOCK):
        largest = largest_f32(row, begin, min(begin + _BLOCK, width), best)
        if largest > best:
            best, block = largest, begin
    place = block
    while place < width - 1 and load_f32(row, place) < best:
        place += 1
    missed = 0
    for i in range(width):
        value = load_f32(row, i)
        missed += 1 if value != value else 0  # NaN
    store_f32(load_i64(a, _BEST), chunk, _NAN if missed > 0 else best)
    store_i64(load_i64(a, _OUT), chunk, place)


def _draw_kernel(a: Any, chunk: Any) -> None:
    """One draw by the inverse CDF in order of ids: blocks first, then inside of one."""
    row, width = _row(a, chunk), load_i64(a, _WIDTH)
    best = largest_f32(row, 0, width, _MINUS_INFINITY)
    temperature = load_f32(load_i64(a, _TEMPERATURE), chunk)
    blocks = (width + _BLOCK - 1) // _BLOCK
    memory = np.empty(blocks, np.float64)
    sums = memory.ctypes.data
    total = 0.0
    for block in range(blocks):
        begin = block * _BLOCK
        total += _weigh_block(row, begin, min(begin + _BLOCK, width), best, temperature)
        store_f64(sums, block, total)
    target = load_f64(load_i64(a, _UNIFORMS), chunk) * total
    block = 0
    while block < blocks - 1 and load_f64(sums, block) <= target:
        block += 1
    running = load_f64(sums, block - 1) if block > 0 else 0.0
    drawn = -1
    for i in range(block * _BLOCK, min((block + 1) * _BLOCK, width)):
        weight = _weight(load_f32(row, i), best, temperature)
        running += np.float64(weight)
        if weight > _ZERO:
            # Rounding may leave the target at the end of the block: then its last one is meant.
            drawn = i
            if running > target:
                break
    store_i64(load_i64(a, _OUT), chunk, drawn)
    keep_alive(memory)


@inlined
def _exact_weight(logit: np.float32, best: np.float32, temperature: np.float32) -> float:
    return math.exp((np.float64(logit) - np.float64(best)) / np.float64(temperature))


@inlined
def _mass(
    row: int, width: int, best: np.float32, temperature: np.float32, least: np.float32
) -> float:
    """The weight of all tokens of a row whose weight is at least `least`."""
    total = 0.0
    for begin in range(0, width, _BLOCK):
        for i in range(begin, min(begin + _BLOCK, width)):
            weight = _weight(load_f32(row, i), best, temperature)
            total += np.float64(weight if weight >= least else _ZERO)
    return total


@inlined
def _count(row: int, width: int, bound: np.float32) -> int:
    count = 0
    for i in range(width):
        count += 1 if load_f32(row, i) >= bound else 0
    return count


@inlined
def _gather(
    row: int, width: int, bound: np.float32, best: np.float32, temperature: np.float32, keys: int
) -> float:
    """Put the tokens from `bound` on into keys; their weight.

    A key orders by logit, then the lower id first.
    """
    count, total = 0, 0.0
    for i in range(width):
        logit = load_f32(row, i)
        if logit >= bound:
            bits = load_i32(row, i) if logit != _ZERO else 0  # one key for both zeros
            ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            store_i64(keys, count, (ordered << 32) | (_ID_MASK - i))
            count += 1
            total += _exact_weight(logit, best, temperature)
    return total


@inlined
def _sift_down(keys: int, place: int, count: int) -> None:
    moved = load_i64(keys, place)
    child = 2 * place + 1
    while child < count:
        if child + 1 < count and load_i64(keys, child + 1) > load_i64(keys, child):
            child += 1
        if load_i64(keys, child) <= moved:
            break
        store_i64(keys, place, load_i64(keys, child))
        place, child = child, 2 * child + 1
    store_i64(keys, place, moved)


@inlined
def _make_heap(keys: int, count: int) -> None:
    for place in range(count // 2 - 1, -1, -1):
        _sift_down(keys, place, count)


@inlined
def _take_best(keys: int, count: int) -> int:
    """The id of the best of `count` keys, which leaves the heap."""
    key = load_i64(keys, 0)
    store_i64(keys, 0, load_i64(keys, count - 1))
    _sift_down(keys, 0, count - 1)
    number: int = _ID_MASK - (key & _ID_MASK)
    return number


def _draw_filtered_kernel(a: Any, chunk: Any) -> None:
    """One draw from what min_p, top_k and top_p leave, best first."""
    row, width = _row(a, chunk), load_i64(a, _WIDTH)
    best = largest_f32(row, 0, width, _MINUS_INFINITY)
    temperature = load_f32(load_i64(a, _TEMPERATURE), chunk)
    min_p, top_k, top_p = (
        load_f64(load_i64(a, _MIN_P), chunk),
        load_i64(load_i64(a, _TOP_K), chunk),
        load_f64(load_i64(a, _TOP_P), chunk),
    )
    narrowing = top_p < 1.0
    mass = 0.0
    if narrowing and top_k == 0:
        mass = _mass(row, width, best, temperature, np.float32(min_p))
    depth, enough, count = _FIRST_DEPTH, False, 0
    memory = np.empty(1, np.int64)
    while not enough:
        everything = bool(depth > -_LEAST)
        bound = _MINUS_INFINITY if everything else best - temperature * depth
        count = _count(row, width, bound)
        memory = np.empty(count, np.int64)
        weight = _gather(row, width, bound, best, temperature, memory.ctypes.data)
        enough = (
            everything
            or (0 < top_k <= count)
            or math.exp(-np.float64(depth)) < 0.99 * min_p
            or (narrowing and top_k == 0 and weight >= 1.001 * top_p * mass)
        )
        depth = depth * np.float32(2)

    keys = memory.ctypes.data
    _make_heap(keys, count)
    kept_ids = np.empty(count, np.int64)
    running = np.empty(count, np.float64)
    most = min(count, top_k) if top_k > 0 else count
    kept, total = 0, 0.0
    while kept < most:
        token = _take_best(keys, count - kept)
        weight = _exact_weight(load_f32(row, token), best, temperature)
        if kept > 0 and (weight < min_p or weight <= 0.0):
            break
        total += weight
        store_i64(kept_ids.ctypes.data, kept, token)
        store_f64(running.ctypes.data, kept, total)
        kept += 1
        if narrowing and top_k == 0 and total >= top_p * mass:
            break
    if narrowing and top_k > 0:
        reached = 0
        while reached < kept - 1 and load_f64(running.ctypes.data, reached) < top_p * total:
            reached += 1
        kept = reached + 1
    target = load_f64(load_i64(a, _UNIFORMS), chunk) * load_f64(running.ctypes.data, kept - 1)
    place = 0
    while place < kept - 1 and load_f64(running.ctypes.data, place) <= target:
        place += 1
    store_i64(load_i64(a, _OUT), chunk, load_i64(kept_ids.ctypes.data, place))
    keep_alive(memory)
    keep_alive(kept_ids)
    keep_alive(running)


_argmax = Kernel(_argmax_kernel)
_draw = Kernel(_draw_kernel)
_draw_filtered = Kernel(_draw_filtered_kernel)
