"""Penalties, filters and draws as the GPU does them: no sort, and noise that needs no state.

A draw is Gumbel-max: argmax(logit / temperature + g) with independent Gumbel noise g follows
softmax(logit / temperature). The noise of a token is a hash of the draw's stream and the token's
id, so it is the same alone, in company and after a preemption.
"""

import torch
from torch import Tensor

from octavo.kernels.sampling_args import SamplingFilters
from octavo.kernels.seeded_args import Cutoff, Penalties, SeededDraws, TokenCounts

_WORD = 0xFFFFFFFF
_LARGEST = torch.finfo(torch.float32).max


def penalize(logits: Tensor, counts: TokenCounts, penalties: Penalties) -> None:
    """Applies `penalties` to `logits` fp32 [R, V] in place: repetition, frequency, presence."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    prompt_bits = counts.prompt_bits.index_select(0, counts.rows)
    outputs = counts.outputs.index_select(0, counts.rows)
    prompt = (prompt_bits[:, ids // 32] >> (ids % 32)) & 1 > 0
    seen = prompt | (outputs > 0)
    repetition = penalties.repetition[:, None]
    # Small penalties must not make infinities, which would count as a failure of the model.
    divided = (logits / repetition).clamp(max=_LARGEST)
    repeated = torch.where(logits > 0, divided, logits * repetition)
    out = torch.where(seen, repeated, logits)
    out -= penalties.frequency[:, None] * outputs
    out -= penalties.presence[:, None] * (outputs > 0)
    logits.copy_(out)


def find_cutoff(logits: Tensor, rows: Tensor, filters: SamplingFilters) -> Cutoff:
    """The tokens of `logits` fp32 [R, V] that min_p, then top_k, then top_p leave of each row.

    `rows` int64 [N] and `filters` as in `octavo.kernels.ops.draw_filtered`, whose rules hold: each
    filter works on what the one before left, and of equal logits the lower id is the better.
    """
    chosen = logits.index_select(0, rows)
    ranked, ids = chosen.sort(dim=-1, descending=True, stable=True)
    weights = ((ranked - ranked[:, :1]).double() / filters.temperature.double()[:, None]).exp()
    places = torch.arange(ranked.shape[1], device=logits.device)
    kept = ((weights >= filters.min_p[:, None]) & (ranked > -torch.inf)).sum(-1)
    kept = torch.where(filters.top_k > 0, torch.minimum(kept, filters.top_k), kept)
    running = (weights * (places < kept[:, None])).cumsum(-1)
    reached = (running < filters.top_p[:, None] * running[:, -1:]).sum(-1) + 1
    kept = torch.where(filters.top_p < 1, torch.minimum(kept, reached), kept)
    last = (kept - 1).clamp(min=0)[:, None]
    return Cutoff(ranked.gather(1, last)[:, 0], ids.gather(1, last)[:, 0].int())


def draw_seeded(logits: Tensor, draws: SeededDraws, cutoff: Cutoff | None) -> Tensor:
    """One id per draw from the surviving tokens of its row: int64 [N].

    `logits` fp32 [R, V]. Temperature 0 takes the best token, the lowest id on a tie.
    """
    chosen = logits.index_select(0, draws.rows)
    ids = torch.arange(logits.shape[1], device=logits.device)
    greedy = draws.temperature[:, None] == 0
    scores = chosen / torch.where(greedy, 1.0, draws.temperature[:, None])
    noise = _gumbel(draws.streams[:, None], ids[None, :])
    scores = torch.where(greedy, chosen, scores + noise)
    if cutoff is not None:
        value, last = cutoff.value[:, None], cutoff.last_id[:, None]
        scores = scores.masked_fill(
            (chosen < value) | ((chosen == value) & (ids > last)), -torch.inf
        )
    return scores.argmax(-1)


def log_sum_exp(logits: Tensor) -> Tensor:
    """log(sum(exp(logits))) of each row of `logits` fp32 [R, V]: fp32 [R]."""
    return logits.logsumexp(-1)


def _gumbel(streams: Tensor, ids: Tensor) -> Tensor:
    """-log(E), E = -log(1 - u) exponential, u = (hash + 1/2) / 2^32.

    The largest Gumbel values come from the smallest u, where u is finest and the series
    u + u^2 / 2 + u^3 / 3 replaces the logarithm, which would lose the digits of u.
    """
    bits = _hash(streams & _WORD, (streams >> 32) & _WORD, ids)
    u = (bits.float() + 0.5) * 2.0**-32
    series = u * (1.0 + u * (0.5 + u * 0.33333334))
    exponential = torch.where(u < 0.01, series, -torch.log((1.0 - u).clamp(min=2.0**-25)))
    return -torch.log(exponential)


def _hash(low: Tensor, high: Tensor, ids: Tensor) -> Tensor:
    """32 bits from a stream's 64 bits and an id: MurmurHash3's finalizer, once for each half."""
    return _mix(_mix((low + ids * 0x9E3779B1) & _WORD) ^ high)


def _mix(h: Tensor) -> Tensor:
    """fmix32 of MurmurHash3 (Austin Appleby, public domain), on 32 bits held in int64."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _WORD
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)
