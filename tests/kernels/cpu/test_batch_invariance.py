"""A row's result is the same to the last bit, whatever else is computed with it."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu
from octavo.kernels.cpu.attention import paged_attention
from octavo.kernels.cpu.linear import linear, pack_int8_linear, pack_linear
from octavo.kernels.cpu.numbers import CODES

_DTYPES = [torch.bfloat16, torch.float32]
_BLOCK_SIZE = 16
_HEADS = (6, 2)
# One whose rows fill no vectors of 32, and one that has products of its own for few rows.
_SIZES = [24, 64]


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(577, 100), (64, 33), (1540, 48)])
def test_linear(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(40, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    packed = pack_linear(weight, torch.randn(outputs, generator=generator).to(dtype))
    alone = torch.cat([linear(row[None], packed) for row in x])
    for tokens in range(1, 41):
        assert torch.equal(linear(x[:tokens], packed), alone[:tokens]), tokens


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(577, 100), (64, 33), (1540, 48)])
def test_int8_linear(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(40, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    packed = pack_int8_linear(weight, torch.randn(outputs, generator=generator).to(dtype))
    alone = torch.cat([linear(row[None], packed) for row in x])
    for tokens in range(1, 41):
        assert torch.equal(linear(x[:tokens], packed), alone[:tokens]), tokens


class _Text:
    """A sequence with its keys and values in shuffled blocks; what is not written holds NaN."""

    def __init__(self, length: int, dtype: torch.dtype, size: int) -> None:
        generator = torch.Generator().manual_seed(length)
        blocks = -(-length // _BLOCK_SIZE)
        shape = (2 * blocks + 1, _HEADS[1], _BLOCK_SIZE, size)
        self.length = length
        self.q = torch.randn(length, _HEADS[0], size, generator=generator).to(dtype)
        self.k, self.v = (
            torch.randn(length, _HEADS[1], size, generator=generator).to(dtype) for _ in range(2)
        )
        self.keys = torch.full(shape, float("nan"), dtype=dtype)
        self.values = self.keys.clone()
        self.tables = torch.randperm(2 * blocks, generator=generator)[None, :blocks].int()
        positions = torch.arange(length)
        self.slots = self.tables[0, positions // _BLOCK_SIZE].long() * _BLOCK_SIZE
        self.slots += positions % _BLOCK_SIZE

    def attend(self, chunks: list[int], window: int | None) -> Tensor:
        """[length, Hq, D], computed `chunks` tokens at a time."""
        parts = []
        start = 0
        for count in chunks:
            part = slice(start, start + count)
            start += count
            slots = self.slots[part]
            cpu.write_kv_cache(self.k[part], self.v[part], self.keys, self.values, slots)
            batch = _Batch(self.tables, [start], [count])
            q = self.q[part]
            parts.append(paged_attention(q, self.keys, self.values, batch, 0.3, window, None))
        assert start == self.length
        return torch.cat(parts)


class _Batch:
    def __init__(self, tables: Tensor, lengths: list[int], counts: list[int]) -> None:
        self.block_tables = tables
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        starts = torch.tensor([0, *counts]).cumsum(0)
        self.query_start_loc = starts.int()
        self.max_query_len, self.max_seq_len = max(counts), max(lengths)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("window", [None, 9, 150])
def test_attention_of_a_prompt_in_chunks(dtype: torch.dtype, window: int | None, size: int) -> None:
    whole = _Text(300, dtype, size).attend([300], window)
    for chunks in ([1] * 300, [7] * 42 + [6], [128, 1, 2, 3, 100, 66], [131, 169]):
        assert torch.equal(_Text(300, dtype, size).attend(chunks, window), whole)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("size", _SIZES)
def test_attention_in_company(dtype: torch.dtype, size: int) -> None:
    text = _Text(200, dtype, size)
    whole = text.attend([200], None)
    counts, lengths = [1, 5, 200, 1], [130, 64, 200, 200]
    batch = _Batch(text.tables.expand(4, -1), lengths, counts)
    parts = [text.q[end - count : end] for end, count in zip(lengths, counts, strict=True)]
    out = paged_attention(torch.cat(parts), text.keys, text.values, batch, 0.3, None, None)
    for part, end, count in zip(out.split(counts), lengths, counts, strict=True):
        assert torch.equal(part, whole[end - count : end])
