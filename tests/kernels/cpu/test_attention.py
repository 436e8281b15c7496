"""Paged attention of the CPU kernels against the plain-torch one."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu.attention import paged_attention

_DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class _Batch:
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int


@dataclass
class _Case:
    """Sequences (context, new tokens) in shuffled blocks; rows never written hold NaN."""

    sequences: list[tuple[int, int]]
    heads: tuple[int, int] = (4, 2)
    size: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        needed = [-(-length // self.block_size) for length, _ in self.sequences]
        blocks = sum(needed) + 2
        shape = (blocks + 1, self.heads[1], self.block_size, self.size)
        self.keys = torch.full(shape, float("nan"), dtype=self.dtype)
        self.values = self.keys.clone()
        free = iter(torch.randperm(blocks, generator=generator).tolist())
        tables = torch.zeros(len(needed), max(needed) + 1, dtype=torch.int32)
        for row, (length, _) in enumerate(self.sequences):
            for position in range(length):
                column, inside = divmod(position, self.block_size)
                if inside == 0:
                    tables[row, column] = next(free)
                block = int(tables[row, column])
                for cache in (self.keys, self.values):
                    drawn = torch.randn(self.heads[1], self.size, generator=generator)
                    cache[block, :, inside] = drawn.to(self.dtype)
        counts = [new for _, new in self.sequences]
        starts = [0, *itertools.accumulate(counts)]
        width = (self.heads[0] + 2) * self.size
        q = torch.randn(starts[-1], width, generator=generator).to(self.dtype)
        self.q = q[:, : self.heads[0] * self.size].view(-1, self.heads[0], self.size)
        self.batch = _Batch(
            tables,
            torch.tensor([length for length, _ in self.sequences], dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            max(counts),
            max(length for length, _ in self.sequences),
        )

    def check(self) -> None:
        scale = self.size**-0.5
        arguments = (self.q, self.keys, self.values, self.batch, scale, self.window, self.soft_cap)
        actual = paged_attention(*arguments)
        expected = reference.paged_attention(*arguments)
        assert actual.dtype == self.dtype
        # Of bfloat16, weights too may be rounded: 2^-9 of values of about 1, and once more.
        close = {"rtol": 0.016, "atol": 0.004} if self.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(actual, expected, **close)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_decode_of_several_lengths(dtype: torch.dtype) -> None:
    _Case([(1, 1), (16, 1), (17, 1), (129, 1), (300, 1)], dtype=dtype).check()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_prefill_chunk_and_decode_together(dtype: torch.dtype) -> None:
    _Case([(150, 40), (33, 1), (7, 7), (64, 64)], dtype=dtype).check()


@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 1), (32, 1)], ids=str)
def test_group_sizes(heads: tuple[int, int]) -> None:
    _Case([(40, 12), (20, 1)], heads=heads).check()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 40, 80, 96, 128, 256])
def test_head_sizes(size: int, dtype: torch.dtype) -> None:
    _Case([(21, 5), (9, 1)], size=size, dtype=dtype).check()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 4, 5, 7, 32])
def test_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    _Case([(50, 9), (13, 1)], block_size=block_size, dtype=dtype, window=11).check()


def test_head_size_without_a_kernel() -> None:
    _Case([(21, 5)], size=12).check()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 5, 16, 130, 1000])
@pytest.mark.parametrize("size", [16, 64])
def test_window(window: int, dtype: torch.dtype, size: int) -> None:
    _Case([(290, 140), (200, 1), (3, 3)], size=size, dtype=dtype, window=window).check()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 64])
def test_soft_cap(dtype: torch.dtype, size: int) -> None:
    _Case([(150, 20), (3, 1)], size=size, dtype=dtype, soft_cap=1.5).check()


def test_empty_sequence_gives_zeros() -> None:
    case = _Case([(0, 1), (5, 1)])
    case.check()
    assert (
        paged_attention(case.q, case.keys, case.values, case.batch, 1.0, None, None)[0] == 0
    ).all()


def test_scores_far_apart_do_not_overflow() -> None:
    case = _Case([(200, 3)])
    case.q = case.q * 1e4
    case.check()


def test_nan_stays_in_its_sequence() -> None:
    case = _Case([(20, 1), (20, 1)])
    case.q = case.q.clone()
    case.q[0] = float("nan")
    out = paged_attention(case.q, case.keys, case.values, case.batch, 1.0, None, None)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("block", [-1, 1000])
def test_block_outside_the_cache_is_refused(block: int) -> None:
    case = _Case([(20, 1)])
    case.batch.block_tables[0, 1] = block
    with pytest.raises(IndexError, match="block outside the cache"):
        case.check()


def test_sequence_longer_than_its_table_is_refused() -> None:
    case = _Case([(20, 1)])
    case.batch.seq_lens[0] = 1000
    with pytest.raises(IndexError, match="block outside the cache"):
        paged_attention(case.q, case.keys, case.values, case.batch, 1.0, None, None)
