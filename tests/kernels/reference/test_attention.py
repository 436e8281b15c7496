"""Paged attention against dense attention in float64, over caches full of NaN."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.reference import attention, paged_attention


@dataclass(frozen=True)
class Batch:
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True)
class Case:
    """Sequences as (query tokens, tokens in all), with random keys and values."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    size: int = 8
    block_size: int = 4
    dtype: torch.dtype = torch.float32

    def build(self) -> tuple[Tensor, Tensor, Tensor, Batch, list[tuple[Tensor, Tensor]]]:
        """q, key cache, value cache, batch, and dense (k, v) [tokens, Hkv, D] per sequence."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        lengths = [length for _, length in self.sequences]
        widths = [-(-length // self.block_size) for length in lengths]
        order = torch.randperm(sum(widths) + 3, generator=generator).tolist()
        shape = (len(order), self.kv_heads, self.block_size, self.size)
        key_cache = torch.full(shape, torch.nan, dtype=self.dtype)
        value_cache = torch.full(shape, torch.nan, dtype=self.dtype)
        tables = torch.zeros(len(lengths), max(widths) + 1, dtype=torch.int32)
        dense = []
        for row, length in enumerate(lengths):
            k, v = (
                random(length, self.kv_heads, self.size),
                random(length, self.kv_heads, self.size),
            )
            dense.append((k, v))
            for column in range(widths[row]):
                block = order.pop()
                tables[row, column] = block
                start = column * self.block_size
                rows = min(self.block_size, length - start)
                key_cache[block, :, :rows] = k[start : start + rows].transpose(0, 1)
                value_cache[block, :, :rows] = v[start : start + rows].transpose(0, 1)
        queries = [count for count, _ in self.sequences]
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        batch = Batch(
            tables, torch.tensor(lengths, dtype=torch.int32), starts, max(queries), max(lengths)
        )
        return random(sum(queries), self.heads, self.size), key_cache, value_cache, batch, dense


def expected(
    q: Tensor,
    batch: Batch,
    dense: list[tuple[Tensor, Tensor]],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """One query token and head at a time, float64."""
    rows = []
    starts = batch.query_start_loc.tolist()
    for sequence, (k, v) in enumerate(dense):
        count = starts[sequence + 1] - starts[sequence]
        for place in range(count):
            position = len(k) - count + place
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            heads = []
            for head in range(q.shape[1]):
                kv_head = head * k.shape[1] // q.shape[1]
                query = q[starts[sequence] + place, head].double()
                scores = k[seen, kv_head].double() @ query * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                heads.append(torch.softmax(scores, 0) @ v[seen, kv_head].double())
            rows.append(torch.stack(heads))
    return torch.stack(rows)


DECODES = ((1, 1), (1, 4), (1, 5), (1, 30), (1, 8))
MIXED = ((1, 9), (6, 6), (1, 17), (3, 12), (5, 5), (1, 1), (2, 8))


@pytest.mark.parametrize("sequences", [DECODES, MIXED, ((13, 13),)], ids=["one", "mixed", "whole"])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 100])
def test_equals_dense_attention(sequences: tuple[tuple[int, int], ...], window: int | None) -> None:
    q, keys, values, batch, dense = Case(sequences).build()
    out = paged_attention(q, keys, values, batch, 0.3, window, None)
    torch.testing.assert_close(
        out.double(), expected(q, batch, dense, 0.3, window), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1), (14, 2), (7, 1)])
def test_f11_query_heads_share_key_heads_in_order(heads: int, kv_heads: int) -> None:
    q, keys, values, batch, dense = Case(MIXED, heads, kv_heads, size=6).build()
    out = paged_attention(q, keys, values, batch, 0.4, None, None)
    torch.testing.assert_close(out.double(), expected(q, batch, dense, 0.4), atol=1e-5, rtol=0)


def test_soft_cap_bounds_the_scaled_scores() -> None:
    q, keys, values, batch, dense = Case(MIXED).build()
    out = paged_attention(q, keys, values, batch, 2.0, None, 1.5)
    torch.testing.assert_close(
        out.double(), expected(q, batch, dense, 2.0, soft_cap=1.5), atol=1e-5, rtol=0
    )


def test_slices_and_groups_do_not_change_values(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values, batch, dense = Case(((1, 20), (11, 19), *DECODES)).build()
    monkeypatch.setattr(attention, "_GROUP_ELEMENTS", 4 * 2 * 8 * 5)
    out = paged_attention(q, keys, values, batch, 0.3, 6, None)
    torch.testing.assert_close(out.double(), expected(q, batch, dense, 0.3, 6), atol=1e-5, rtol=0)


def test_half_precision_is_rounded_once() -> None:
    q, keys, values, batch, dense = Case(MIXED, dtype=torch.bfloat16).build()
    out = paged_attention(q, keys, values, batch, 0.3, None, None)
    exact = expected(q, batch, dense, 0.3)
    # bfloat16 keeps 8 bits: half a unit in the last place is 2^-9 of the value.
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=2**-8)
    assert out.dtype == torch.bfloat16


def test_sequence_without_tokens_gives_zeros() -> None:
    q, keys, values, batch, dense = Case(((1, 5), (1, 4))).build()
    empty = Batch(
        batch.block_tables,
        torch.tensor([5, 0], dtype=torch.int32),
        batch.query_start_loc,
        1,
        5,
    )
    out = ops.paged_attention(q, keys, values, empty, 0.3)
    torch.testing.assert_close(
        out[:1].double(), expected(q, batch, dense, 0.3)[:1], atol=1e-5, rtol=0
    )
    assert torch.equal(out[1], torch.zeros(4, 8))
