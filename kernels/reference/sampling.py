"""Drawing tokens from logits without sorting the vocabulary.

R rows of logits, V ids, N draws. A row's result depends on that row and its own settings only.

A draw is an inverse CDF: with weights w in a fixed order and one uniform u in [0, 1), the token is
the first whose running sum exceeds u * sum(w). A weight of 0 never raises the running sum, so such
a token is never drawn, and u < 1 keeps the target below the total. The order is that of the ids
for plain draws, and best first (ties to the lowest id) for filtered ones.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.sampling_args import SamplingFilters, ScoredTokens

# Ids are searched in two levels: sums and maxima of blocks vectorise, a long running sum does not.
_BLOCK = 256
# Filtered draws look at this many best tokens, and at all for the rows that keep more of them.
_PREFIX = 1024
# Most logits per slice of draws, which bounds the temporaries: on CPU they should fit its caches.
_CPU_SLICE, _GPU_SLICE = 1 << 18, 1 << 24


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.ops.argmax`."""
    width = logits.shape[1]
    maxima = _block_reduce(logits, "amax")
    # argmax takes the first of equal values and holds NaN for the largest.
    block = maxima.argmax(-1, keepdim=True)
    within = torch.arange(min(_BLOCK, width), device=logits.device)
    ids = (block * _BLOCK + within).clamp_(max=width - 1)
    candidates = logits.gather(1, ids)
    best = candidates.argmax(-1, keepdim=True)
    return candidates.gather(1, best).squeeze(1), ids.gather(1, best).squeeze(1)


def draw(logits: Tensor, rows: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    """See `octavo.kernels.ops.draw`."""
    ids = torch.empty_like(rows)
    for part in _slices(rows.shape[0], logits):
        weights = _weights(logits.index_select(0, rows[part]), temperature[part])
        ids[part] = _inverse_cdf(weights, uniforms[part])
    return ids


def draw_filtered(
    logits: Tensor, rows: Tensor, filters: SamplingFilters, uniforms: Tensor
) -> Tensor:
    """See `octavo.kernels.ops.draw_filtered`."""
    ids = torch.empty_like(rows)
    pending = torch.arange(rows.shape[0], device=rows.device)
    for count in (_PREFIX, logits.shape[1]):
        undecided = []
        for part in _slices(pending.shape[0], logits):
            draws = pending[part]
            selected = logits.index_select(0, rows[draws])
            drawn, decided = _draw_best_first(selected, filters.take(draws), uniforms[draws], count)
            ids[draws] = drawn
            undecided.append(draws[~decided])
        pending = torch.cat(undecided)
        if not pending.numel():
            break
    return ids


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredTokens:
    """See `octavo.kernels.ops.score_tokens`."""
    width = logits.shape[1]
    total = logits.logsumexp(-1, keepdim=True)
    chosen = token_ids.unsqueeze(1)
    logit = logits.gather(1, chosen)
    ids = torch.arange(width, device=logits.device)
    ranks = 1 + ((logits > logit) | ((logits == logit) & (ids < chosen))).sum(-1)
    values, top_ids = _best(logits, min(num_top, width))
    return ScoredTokens((logit - total).squeeze(1), ranks, top_ids, values - total)


def score_with_total(
    logits: Tensor, total: Tensor, token_ids: Tensor, num_top: int
) -> ScoredTokens:
    """See `octavo.kernels.ops.score_on_device`; `total` fp32 [N] is the log-sum-exp of each row."""
    parts = [
        _score_with_keys(logits[part], total[part], token_ids[part], num_top)
        for part in _slices(logits.shape[0], logits)
    ]
    return ScoredTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _score_with_keys(
    logits: Tensor, total: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of ScoredTokens.

    The order of logits and, among equals, of ids is that of one 64-bit key, so that a plain top-k
    finds the best ones.
    """
    width = logits.shape[1]
    ids = torch.arange(width, device=logits.device)
    # Adding zero makes one number of the two zeros.
    bits = (logits + 0.0).view(torch.int32).long()
    keys = (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32) | (width - ids)
    chosen = token_ids.unsqueeze(1)
    ranks = 1 + (keys > keys.gather(1, chosen)).sum(-1)
    top_ids = width - (keys.topk(min(num_top, width), dim=-1).values & 0xFFFFFFFF)
    return (
        logits.gather(1, chosen).squeeze(1) - total,
        ranks,
        top_ids,
        logits.gather(1, top_ids) - total.unsqueeze(1),
    )


def _slices(count: int, logits: Tensor) -> list[slice]:
    most = _CPU_SLICE if logits.is_cpu else _GPU_SLICE
    size = max(1, most // logits.shape[1])
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _block_reduce(x: Tensor, how: Literal["amax", "sum"]) -> Tensor:
    """Maxima or float64 sums of x [R, V] over blocks of ids; the last block is short."""
    blocks = x.shape[1] // _BLOCK
    even, odd = x[:, : blocks * _BLOCK], x[:, blocks * _BLOCK :]
    parts = [even.view(x.shape[0], blocks, _BLOCK), odd.unsqueeze(1)]
    return torch.cat(
        [
            part.amax(-1) if how == "amax" else part.sum(-1, dtype=torch.float64)
            for part in parts
            if part.numel()
        ],
        1,
    )


def _weights(scratch: Tensor, temperature: Tensor) -> Tensor:
    """exp((x - max x) / temperature) of each row, in place; the best token has weight 1."""
    scratch.sub_(_block_reduce(scratch, "amax").amax(-1, keepdim=True))
    return scratch.div_(temperature.unsqueeze(1)).exp_()


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws in order of ids from unnormalized weights [N, V]: int64 [N]."""
    width = weights.shape[1]
    running = _block_reduce(weights, "sum").cumsum(1)
    target = uniforms.unsqueeze(1) * running[:, -1:]
    block = torch.searchsorted(running, target, right=True)
    before = torch.where(block > 0, running.gather(1, (block - 1).clamp_(min=0)), 0.0)

    ids = block * _BLOCK + torch.arange(min(_BLOCK, width), device=weights.device)
    inside = weights.gather(1, ids.clamp(max=width - 1)).double()
    inside = (inside * (ids < width)).cumsum_(1)
    place = torch.searchsorted(inside, target - before, right=True)
    # Rounding may leave the target at the end of the block: then its last possible token is meant,
    # which is where the running sum reaches its maximum for the first time.
    last = inside.argmax(-1, keepdim=True)
    return ids.gather(1, torch.minimum(place, last)).squeeze(1)


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best (logits, ids) of each row, best first, ties to the lowest id."""
    if count == 0:
        empty = logits.new_empty((logits.shape[0], 0))
        return empty, empty.long()
    values = _best_values(logits, count)
    # All that could be among the best, by row and id; then by row, value and id.
    rows, ids = torch.nonzero(logits >= values[:, -1:], as_tuple=True)
    order = logits[rows, ids].sort(descending=True, stable=True).indices
    rows, by_row = rows[order].sort(stable=True)
    first = torch.searchsorted(rows, torch.arange(logits.shape[0], device=rows.device))
    places = first.unsqueeze(1) + torch.arange(count, device=rows.device)
    return values, ids[order][by_row][places]


def _best_values(logits: Tensor, count: int) -> Tensor:
    """The `count` highest values of each row, at most all, highest first."""
    if logits.device.type != "cpu":
        return logits.topk(min(count, logits.shape[1]), dim=-1).values
    # numpy's partition and sort of plain values vectorise: 4 and 20 times faster than torch's.
    values = -logits.numpy()
    if count < logits.shape[1]:
        values = np.partition(values, count - 1, axis=-1)[:, :count]
    return torch.from_numpy(np.sort(values, axis=-1)).neg_()


def _draw_best_first(
    logits: Tensor, filters: SamplingFilters, uniforms: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Filtered draws from the `count` best tokens of each row of `logits` [N, V].

    Returns ids [N] and whether those tokens were enough to decide, bool [N]; ids of other rows
    mean nothing.
    """
    values = _best_values(logits, count)
    columns = values.shape[1]
    kept, running = _keep(values, filters, None if columns == logits.shape[1] else logits)
    last = (kept.clamp(max=columns) - 1).unsqueeze(1)
    target = uniforms.unsqueeze(1) * running.gather(1, last)
    place = torch.minimum(torch.searchsorted(running, target, right=True), last)
    # Equal values follow each other in order of their ids.
    value = values.gather(1, place)
    number = place.squeeze(1) - (values > value).sum(-1)
    rows, ids = torch.nonzero(logits == value, as_tuple=True)
    first = torch.searchsorted(rows, torch.arange(logits.shape[0], device=rows.device))
    return ids[first + number], kept <= columns


def _keep(values: Tensor, filters: SamplingFilters, rest: Tensor | None) -> tuple[Tensor, Tensor]:
    """How many of the best tokens survive min_p, then top_k, then top_p: int64 [N].

    `values` [N, C] are the best logits, best first; `rest` the whole rows they were taken from, or
    None when nothing is missing. A count above C says that C tokens were too few to tell. Also
    returns the running sums of the weights, float64 [N, C].
    """
    columns = values.shape[1]
    temperature = filters.temperature.double().unsqueeze(1)
    weights = ((values.double() - values[:, :1]) / temperature).exp_()
    running = weights.cumsum(1)
    kept = ((weights > 0) & (weights >= filters.min_p.unsqueeze(1))).sum(-1)
    if rest is not None:
        kept = torch.where(kept == columns, columns + 1, kept)
    kept = torch.where(filters.top_k > 0, torch.minimum(kept, filters.top_k), kept)
    narrowing = filters.top_p < 1
    if bool(narrowing.any()):
        mass = running.gather(1, (kept.clamp(max=columns) - 1).unsqueeze(1)).squeeze(1)
        if rest is not None:
            mass = _open_mass(mass, kept > columns, filters, rest)
        reached = torch.searchsorted(running, (filters.top_p * mass).unsqueeze(1)).squeeze(1) + 1
        kept = torch.where(narrowing, torch.minimum(kept, reached), kept)
    return kept, running


def _open_mass(mass: Tensor, is_open: Tensor, filters: SamplingFilters, rest: Tensor) -> Tensor:
    """`mass` with that of the open rows replaced by the weight of the whole row.

    Where min_p or top_k leaves less than the whole row, but more than was looked at, the mass is
    not known: infinite, so that top_p does not reach it.
    """
    rows = torch.nonzero(is_open).squeeze(1)
    if not rows.numel():
        return mass
    weights = _weights(rest.index_select(0, rows), filters.temperature[rows])
    whole = _block_reduce(weights, "sum").sum(-1)
    unknown = (filters.min_p[rows] > 0) | (filters.top_k[rows] > 0)
    return mass.index_copy(0, rows, whole.masked_fill(unknown, torch.inf))
