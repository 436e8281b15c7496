"""Causal attention over a paged cache, in fp32.

Sequences with one query token are gathered together, padded to the longest, in groups of bounded
size; the others run one by one, in slices of query tokens. Query heads that share a KV head are
rows of one product, so keys and values are never expanded.

B sequences of a group   n query tokens of each   L gathered token positions   G = Hq / Hkv
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.kernels.attention_args import PagedBatch

_GROUP_ELEMENTS = 1 << 24
"""Most elements of the gathered keys of a group, and of a slice's scores: 64 MiB of fp32."""


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """See `octavo.kernels.ops.paged_attention`."""
    attention = _Attention(key_cache, value_cache, batch.block_tables, scale, window, soft_cap)
    out = torch.zeros_like(q)
    starts: list[int] = batch.query_start_loc.tolist()
    lengths: list[int] = batch.seq_lens.tolist()
    singles: list[int] = []
    for row, seq_len in enumerate(lengths):
        first, end = starts[row], starts[row + 1]
        if end - first == 1:
            singles.append(row)
        elif end > first:
            for part in _query_slices(first, end, q.shape[1] * seq_len):
                length = seq_len - (end - part.stop)
                out[part] = attention.run(q[part].unsqueeze(0), [row], [length])[0]
    for group in _groups(singles, lengths, key_cache.shape[1] * key_cache.shape[3]):
        tokens = torch.tensor([starts[row] for row in group], device=q.device)
        result = attention.run(q[tokens].unsqueeze(1), group, [lengths[row] for row in group])
        out[tokens] = result.squeeze(1)
    return out


def _query_slices(first: int, end: int, scores_per_token: int) -> Iterator[slice]:
    step = max(1, _GROUP_ELEMENTS // max(1, scores_per_token))
    for start in range(first, end, step):
        yield slice(start, min(start + step, end))


def _groups(rows: list[int], lengths: list[int], elements_per_token: int) -> Iterator[list[int]]:
    """Sequences of similar length together, so that little is padded; the sizes stay bounded."""
    group: list[int] = []
    for row in sorted(rows, key=lambda row: lengths[row], reverse=True):
        if group:
            longest = lengths[group[0]]
            full = (len(group) + 1) * longest * elements_per_token > _GROUP_ELEMENTS
            if full or 2 * lengths[row] < longest:
                yield group
                group = []
        group.append(row)
    if group:
        yield group


class _Attention:
    """Attention of one layer; its arguments are those of `paged_attention`."""

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> None:
        self._key_cache = key_cache
        self._value_cache = value_cache
        self._block_tables = block_tables
        self._scale = scale
        self._window = window
        self._soft_cap = soft_cap

    def run(self, q: Tensor, rows: list[int], seq_lens: list[int]) -> Tensor:
        """q [B, n, Hq, D], whose last tokens are tokens seq_lens - 1 of sequences `rows`."""
        count, queries, heads, size = q.shape
        kv_heads, block_size = self._key_cache.shape[1:3]
        group = heads // kv_heads
        first_blocks = [self._first_block(length - queries, block_size) for length in seq_lens]
        num_blocks = max(
            -(-length // block_size) - first
            for length, first in zip(seq_lens, first_blocks, strict=True)
        )
        if num_blocks <= 0:
            return torch.zeros_like(q)
        device = q.device
        first = torch.tensor(first_blocks, device=device).unsqueeze(1)
        length = torch.tensor(seq_lens, device=device).unsqueeze(1)
        blocks = self._block_ids(rows, first, num_blocks)
        key_positions = first * block_size + torch.arange(num_blocks * block_size, device=device)
        query_positions = length - queries + torch.arange(queries, device=device)
        written = key_positions < length

        keys = _gather(self._key_cache, blocks)
        # A weight of zero does not stop NaN: rows that were never written must be cleared.
        values = _gather(self._value_cache, blocks).masked_fill_(~written[:, None, :, None], 0)
        packed = q.float().reshape(count, queries, kv_heads, group, size).transpose(1, 2)
        scores = packed.reshape(count, kv_heads, queries * group, size) @ keys.mT
        scores *= self._scale
        if self._soft_cap is not None:
            scores = self._soft_cap * torch.tanh(scores / self._soft_cap)
        hidden = ~self._visible(query_positions, key_positions)
        # The lowest number rather than -inf: a sequence without tokens gives zeros, not NaN.
        scores.view(count, kv_heads, queries, group, -1).masked_fill_(
            hidden[:, None, :, None, :], torch.finfo(torch.float32).min
        )
        out = torch.softmax(scores, dim=-1) @ values
        out = out.view(count, kv_heads, queries, group, size).transpose(1, 2)
        return out.reshape(count, queries, heads, size).to(q.dtype)

    def _first_block(self, first_query: int, block_size: int) -> int:
        """The first block that any query token sees."""
        if self._window is None:
            return 0
        return max(0, first_query - self._window + 1) // block_size

    def _block_ids(self, rows: list[int], first: Tensor, num_blocks: int) -> Tensor:
        """int64 [B, num_blocks]; columns past the end of the table repeat its last one."""
        tables = self._block_tables[torch.tensor(rows, device=first.device)].long()
        columns = first + torch.arange(num_blocks, device=first.device)
        return tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))

    def _visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """bool [B, n, L]: which keys each query sees."""
        distance = query_positions[:, :, None] - key_positions[:, None, :]
        visible = distance >= 0
        if self._window is not None:
            visible &= distance < self._window
        return visible


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """fp32 [B, Hkv, L, D]: the rows of `blocks` [B, num_blocks] in order."""
    count, num_blocks = blocks.shape
    _, kv_heads, block_size, size = cache.shape
    rows = cache.index_select(0, blocks.flatten())
    rows = rows.view(count, num_blocks, kv_heads, block_size, size).transpose(1, 2)
    out = torch.empty(rows.shape, dtype=torch.float32, device=cache.device)
    return out.copy_(rows).view(count, kv_heads, num_blocks * block_size, size)
