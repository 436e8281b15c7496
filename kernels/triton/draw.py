"""Draws by Gumbel-max with counter-based noise, in two stages: tiles of the vocabulary, then rows.

The noise of token i in a draw is a hash of the draw's stream and i, and nothing else: no state,
no order, no neighbours. `octavo.kernels.reference.seeded` has the formulas.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.seeded_args import Cutoff, SeededDraws
from octavo.kernels.triton.host import (
    ceil_div,
    check,
    check_rows_dense,
    check_same_device,
    power_of_2,
)

_TILE = 4096


@triton.jit
def _mix(h):
    """fmix32 of MurmurHash3 on uint32."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _gumbel(stream, ids):
    """Gumbel noise fp32 of token `ids` in the draw named by the 64 bits of `stream`."""
    low = (stream & 0xFFFFFFFF).to(tl.uint32)
    high = ((stream >> 32) & 0xFFFFFFFF).to(tl.uint32)
    bits = _mix(_mix(ids.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
    u = (bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    series = u * (1.0 + u * (0.5 + u * 0.33333334))
    exponential = tl.where(u < 0.01, series, -tl.log(tl.maximum(1.0 - u, 1.0 / 33554432.0)))
    return -tl.log(exponential)


@triton.jit(
    do_not_specialize=["size", "tiles"],
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "temperature_ptr",
        "streams_ptr",
        "cutoff_value_ptr",
        "cutoff_id_ptr",
    ],
)
def _draw_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    streams_ptr,
    cutoff_value_ptr,
    cutoff_id_ptr,
    best_ptr,
    best_id_ptr,
    size,
    tiles,
    logits_stride: tl.int64,
    TILE: tl.constexpr,
):
    draw = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    row = tl.load(rows_ptr + draw)
    temperature = tl.load(temperature_ptr + draw)
    place = logits_ptr + row * logits_stride + ids
    logits = tl.load(place, mask=ids < size, other=float("-inf"))
    scores = logits
    if cutoff_value_ptr is not None:
        value = tl.load(cutoff_value_ptr + draw)
        last_id = tl.load(cutoff_id_ptr + draw)
        survives = (logits > value) | ((logits == value) & (ids <= last_id))
        scores = tl.where(survives, logits, float("-inf"))
    # Most tiles of a filtered row hold no survivor: they need no noise.
    if (temperature > 0) & (tl.max(scores, 0) > float("-inf")):
        scores = scores / temperature + _gumbel(tl.load(streams_ptr + draw), ids)
    best, index = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + draw * tiles + tile, best)
    tl.store(best_id_ptr + draw * tiles + tile, tile * TILE + index)


@triton.jit(do_not_specialize=["tiles"])
def _pick_kernel(best_ptr, best_id_ptr, out_ptr, tiles, PAD: tl.constexpr):
    draw = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PAD)
    place = draw * tiles + columns
    best = tl.load(best_ptr + place, mask=columns < tiles, other=float("-inf"))
    winner = tl.argmax(best, 0, tie_break_left=True)
    tl.store(out_ptr + draw, tl.load(best_id_ptr + draw * tiles + winner).to(tl.int64))


def draw_seeded(logits: Tensor, draws: SeededDraws, cutoff: Cutoff | None) -> Tensor:
    """See `octavo.kernels.reference.draw_seeded`."""
    check(logits.dim() == 2 and logits.dtype == torch.float32, "{} {}", logits.shape, logits.dtype)
    check_rows_dense("logits", logits)
    count = draws.rows.shape[0]
    expected = {
        "rows": (draws.rows, torch.int64),
        "temperature": (draws.temperature, torch.float32),
        "streams": (draws.streams, torch.int64),
    }
    if cutoff is not None:
        expected["cutoff value"] = (cutoff.value, torch.float32)
        expected["cutoff id"] = (cutoff.last_id, torch.int32)
    for name, (x, dtype) in expected.items():
        check(x.shape == (count,) and x.dtype == dtype, "{} must be {} [{}]", name, dtype, count)
        check_rows_dense(name, x)
        check_same_device(logits, x)
    size = logits.shape[1]
    tiles = ceil_div(size, _TILE)
    best = torch.empty((count, tiles), dtype=torch.float32, device=logits.device)
    best_ids = torch.empty((count, tiles), dtype=torch.int32, device=logits.device)
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    _draw_kernel[(count, tiles)](
        logits,
        draws.rows,
        draws.temperature,
        draws.streams,
        None if cutoff is None else cutoff.value,
        None if cutoff is None else cutoff.last_id,
        best,
        best_ids,
        size,
        tiles,
        logits.stride(0),
        TILE=_TILE,
        num_warps=8,
    )
    _pick_kernel[(count,)](best, best_ids, out, tiles, PAD=max(32, power_of_2(tiles)), num_warps=1)
    return out
