"""Runs a model over paged caches by hand, without scheduler or model runner."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from octavo.engine.attention.metadata import (
    NO_SCALES,
    AttentionMetadata,
    ForwardBatch,
    KVCacheLayout,
    LayerKVCache,
)
from octavo.engine.models.decoder import CausalLM


class PagedDriver:
    """Sequences by number, each with blocks of its own; the cache starts full of NaN.

    Blocks are handed out from the highest id down, so that no block table is a plain range.
    """

    def __init__(
        self,
        model: CausalLM,
        num_blocks: int = 64,
        block_size: int = 16,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        config = model.config
        layout = KVCacheLayout(
            num_blocks, config.num_kv_heads, block_size, config.head_dim, cache_dtype or model.dtype
        )
        scales = [NO_SCALES] * config.num_layers if cache_dtype is None else model.cache_scales()
        self._model = model
        self._block_size = block_size
        self.layers = tuple(
            LayerKVCache(
                torch.full(layout.shape, torch.nan).to(layout.dtype),
                torch.full(layout.shape, torch.nan).to(layout.dtype),
                *pair,
            )
            for pair in scales
        )
        self._free = list(range(num_blocks))
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Appends tokens to sequences, in one forward pass; fp32 logits [n, vocab] of each."""
        batch = self._batch(tokens)
        hidden = self._model(batch)
        logits = self._model.compute_logits(hidden[batch.logits_indices])
        parts = logits.split([len(ids) for ids in tokens.values()])
        return dict(zip(tokens, parts, strict=True))

    def free(self, sequence: int) -> None:
        """Gives the blocks of a sequence back; their rows keep what was written."""
        self._free += self._tables.pop(sequence)
        del self._lengths[sequence]

    def prefill(self, sequence: int, ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """Logits [n, vocab] of a prompt, computed `chunk` tokens at a time."""
        size = chunk or len(ids)
        parts = [
            self.step({sequence: ids[start : start + size]})[sequence]
            for start in range(0, len(ids), size)
        ]
        return torch.cat(parts)

    def greedy(self, prompts: Mapping[int, Sequence[int]], count: int) -> dict[int, list[int]]:
        """`count` tokens after each prompt, all sequences in the same steps."""
        produced: dict[int, list[int]] = {sequence: [] for sequence in prompts}
        tokens: Mapping[int, Sequence[int]] = prompts
        for _ in range(count):
            logits = self.step(tokens)
            tokens = {sequence: [int(rows[-1].argmax())] for sequence, rows in logits.items()}
            for sequence, ids in tokens.items():
                produced[sequence] += ids
        return produced

    def _batch(self, tokens: Mapping[int, Sequence[int]]) -> ForwardBatch:
        positions: list[int] = []
        slots: list[int] = []
        for sequence, ids in tokens.items():
            start = self._lengths.get(sequence, 0)
            end = start + len(ids)
            table = self._tables.setdefault(sequence, [])
            while len(table) * self._block_size < end:
                table.append(self._free.pop())
            self._lengths[sequence] = end
            positions += range(start, end)
            slots += (
                table[place // self._block_size] * self._block_size + place % self._block_size
                for place in range(start, end)
            )
        tables = [self._tables[sequence] for sequence in tokens]
        width = max(len(table) for table in tables)
        query_lens = [len(ids) for ids in tokens.values()]
        seq_lens = [self._lengths[sequence] for sequence in tokens]
        metadata = AttentionMetadata(
            slot_mapping=_int64(slots),
            block_tables=_int32(table + [0] * (width - len(table)) for table in tables),
            seq_lens=_int32(seq_lens),
            query_start_loc=_int32([0, *torch.tensor(query_lens).cumsum(0).tolist()]),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )
        return ForwardBatch(
            input_ids=_int64(token for ids in tokens.values() for token in ids),
            positions=_int64(positions),
            logits_indices=torch.arange(len(positions)),
            attention=metadata,
            kv_caches=self.layers,
        )


def _int64(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _int32(values: Iterable[int] | Iterable[list[int]]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
