"""min_p, top_k and top_p without a sort: where to cut each row, by a search over pivots.

The bits of a float, mapped to unsigned integers, have the order of the numbers. The search finds
the largest key whose tokens at or above it reach a target, a number of tokens or a mass: four bits
of the key per pass over the row, by counting for 16 pivots at once, so 8 passes whatever the
values. Equal logits share a key; the lower ids of them stay.

One program takes one draw, and all sums are added up in the same order for a row alone and in
company. A row without filters ends at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.sampling_args import SamplingFilters
from octavo.kernels.seeded_args import Cutoff
from octavo.kernels.triton.host import (
    check,
    check_rows_dense,
    check_same_device,
    device_facts,
)

_TILE = 1024
"""Tokens that are compared with all 16 pivots at once."""

_WIDE_TILE = 4096
"""Tokens of a pass that looks at one key only."""


@triton.jit
def _keys(logits):
    """uint32 keys in the order of the logits."""
    # Adding zero makes one number of the two zeros.
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return bits.to(tl.uint32, bitcast=True) ^ ((bits >> 31) | -2147483648).to(
        tl.uint32, bitcast=True
    )


@triton.jit
def _weights(logits, top, temperature):
    return tl.exp((logits - top) / temperature)


@triton.jit
def _largest_key(row_ptr, size, top, temperature, target, MASS: tl.constexpr, TILE: tl.constexpr):
    """The largest key such that the tokens at or above it reach `target`.

    They are counted, or with MASS their weights are added up.
    """
    columns = tl.arange(0, TILE)
    digits = tl.arange(0, 16)
    key = tl.zeros((1,), tl.uint32)
    unit = tl.full((1,), 0x10000000, tl.uint32)
    for _ in range(8):
        pivots = key + digits.to(tl.uint32) * unit
        worths = tl.zeros((TILE, 16), tl.float32)
        following = tl.load(row_ptr + columns, mask=columns < size, other=float("-inf"))
        for start in range(0, size, TILE):
            # On its way while this one is compared: a draw has the SM for itself, so that nothing
            # else would hide the latency.
            logits, ahead = following, start + TILE + columns
            following = tl.load(row_ptr + ahead, mask=ahead < size, other=float("-inf"))
            above = _keys(logits)[:, None] >= pivots[None, :]
            worth = tl.where(logits > float("-inf"), 1.0, 0.0)
            if MASS:
                worth = _weights(logits, top, temperature)
            worths += tl.where(above, worth[:, None], 0.0)
        reached = tl.sum(worths, 0)
        # Pivots grow, so what they reach falls: the last that still reaches the target.
        digit = tl.sum((reached >= target).to(tl.int32), 0) - 1
        key += tl.maximum(digit, 0).to(tl.uint32) * unit
        unit = unit >> 4
    return tl.max(key, 0)


@triton.jit
def _above(row_ptr, size, key, top, temperature, TILE: tl.constexpr):
    """(number, mass) of the tokens above `key`, and (number, mass) of those equal to it."""
    columns = tl.arange(0, TILE)
    sums = tl.zeros((TILE,), tl.float32)
    count = tl.zeros((TILE,), tl.int32)
    equal_sums = tl.zeros((TILE,), tl.float32)
    equal_count = tl.zeros((TILE,), tl.int32)
    for start in range(0, size, TILE):
        logits = tl.load(
            row_ptr + start + columns, mask=start + columns < size, other=float("-inf")
        )
        keys = _keys(logits)
        weights = _weights(logits, top, temperature)
        sums += tl.where(keys > key, weights, 0.0)
        count += (keys > key).to(tl.int32)
        equal_sums += tl.where(keys == key, weights, 0.0)
        equal_count += (keys == key).to(tl.int32)
    return tl.sum(count, 0), tl.sum(sums, 0), tl.sum(equal_count, 0), tl.sum(equal_sums, 0)


@triton.jit(
    do_not_specialize=["size"],
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "temperature_ptr",
        "min_p_ptr",
        "top_k_ptr",
        "top_p_ptr",
    ],
)
def _cutoff_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    value_ptr,
    last_id_ptr,
    size,
    logits_stride: tl.int64,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    draw = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + draw)
    min_p = tl.load(min_p_ptr + draw).to(tl.float32)
    top_k = tl.load(top_k_ptr + draw)
    top_p = tl.load(top_p_ptr + draw).to(tl.float32)
    unfiltered = (min_p <= 0) & (top_k <= 0) & (top_p >= 1)
    if unfiltered | (temperature <= 0):
        tl.store(value_ptr + draw, float("-inf"))
        tl.store(last_id_ptr + draw, size)
        return
    row_ptr = logits_ptr + tl.load(rows_ptr + draw) * logits_stride
    columns = tl.arange(0, WIDE)
    peaks = tl.full((WIDE,), float("-inf"), tl.float32)
    for start in range(0, size, WIDE):
        peaks = tl.maximum(
            peaks,
            tl.load(row_ptr + start + columns, mask=start + columns < size, other=float("-inf")),
        )
    top = tl.max(peaks, 0)

    # The first key above that of -inf: masked tokens never survive.
    key = tl.full((1,), 0x00800000, tl.uint32)
    if min_p > 0:
        least = tl.full((1,), 0.0, tl.float32) + (top + temperature * tl.log(min_p))
        key = tl.maximum(key, _keys(least))
    key = tl.max(key, 0)
    equals_kept = size
    if top_k > 0:
        k_key = _largest_key(row_ptr, size, top, temperature, top_k.to(tl.float32), False, TILE)
        if k_key > key:
            key = k_key
            count, mass, equals, equal_mass = _above(row_ptr, size, key, top, temperature, WIDE)
            equals_kept = tl.minimum(top_k - count, equals).to(tl.int32)
    if top_p < 1:
        count, mass, equals, equal_mass = _above(row_ptr, size, key, top, temperature, WIDE)
        each = equal_mass / tl.maximum(equals, 1).to(tl.float32)
        target = top_p * (mass + each * tl.minimum(equals, equals_kept).to(tl.float32))
        p_key = _largest_key(row_ptr, size, top, temperature, target, True, TILE)
        if p_key >= key:
            count, mass, equals, equal_mass = _above(row_ptr, size, p_key, top, temperature, WIDE)
            each = equal_mass / tl.maximum(equals, 1).to(tl.float32)
            needed = tl.maximum(tl.ceil((target - mass) / each), 1.0).to(tl.int32)
            equals_kept = tl.where(p_key == key, tl.minimum(equals_kept, needed), needed)
            key = p_key

    # The value of the key, and the id of the last of the equals that stay.
    key_vector = tl.zeros((1,), tl.uint32) + key
    sign = (key_vector >> 31).to(tl.int32)
    bits = key_vector ^ tl.where(sign != 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    value = tl.max(bits.to(tl.float32, bitcast=True), 0)
    last_id = -1
    found = 0
    for start in range(0, size, WIDE):
        logits = tl.load(
            row_ptr + start + columns, mask=start + columns < size, other=float("-inf")
        )
        equal = (_keys(logits) == key).to(tl.int32)
        stays = (equal != 0) & (found + tl.cumsum(equal, 0) <= equals_kept)
        last_id = tl.maximum(last_id, tl.max(tl.where(stays, start + columns, -1), 0))
        found += tl.sum(equal, 0)
    tl.store(value_ptr + draw, value)
    tl.store(last_id_ptr + draw, last_id)


def find_cutoff(logits: Tensor, rows: Tensor, filters: SamplingFilters) -> Cutoff:
    """See `octavo.kernels.reference.find_cutoff`.

    The twin adds up in float64, this in float32: where a mass meets top_p to within 1e-6 they may
    differ by the token on the border.
    """
    check(logits.dim() == 2 and logits.dtype == torch.float32, "{} {}", logits.shape, logits.dtype)
    check_rows_dense("logits", logits)
    count = rows.shape[0]
    expected = {
        "rows": (rows, torch.int64),
        "temperature": (filters.temperature, torch.float32),
        "min_p": (filters.min_p, torch.float64),
        "top_k": (filters.top_k, torch.int64),
        "top_p": (filters.top_p, torch.float64),
    }
    for name, (x, dtype) in expected.items():
        check(x.shape == (count,) and x.dtype == dtype, "{} must be {} [{}]", name, dtype, count)
        check_rows_dense(name, x)
        check_same_device(logits, x)
    value = torch.empty(count, dtype=torch.float32, device=logits.device)
    last_id = torch.empty(count, dtype=torch.int32, device=logits.device)
    _cutoff_kernel[(count,)](
        logits,
        rows,
        filters.temperature,
        filters.min_p,
        filters.top_k,
        filters.top_p,
        value,
        last_id,
        logits.shape[1],
        logits.stride(0),
        TILE=_TILE,
        WIDE=_WIDE_TILE,
        # A thousand threads: warps of CDNA, which its 64 KiB tell from others, have 64 each.
        num_warps=16 if device_facts(logits.device).shared_memory <= 64 * 1024 else 32,
    )
    return Cutoff(value, last_id)
