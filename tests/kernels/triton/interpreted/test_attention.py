"""Decode, prefill and mixed attention against the twin, over caches full of NaN."""

from dataclasses import dataclass

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from octavo.kernels import reference, triton
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.triton import attention, decode_attention


@dataclass(frozen=True)
class Batch:
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    decode_tokens: int | None


@dataclass(frozen=True)
class Case:
    """Sequences as (query tokens, tokens in all) in shuffled blocks; unwritten rows are NaN."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    block_size: int = 16

    def build(self) -> tuple[Tensor, Tensor, Tensor, Batch]:
        generator = torch.Generator().manual_seed(0)
        lengths = [length for _, length in self.sequences]
        widths = [-(-length // self.block_size) for length in lengths]
        order = torch.randperm(sum(widths) + 3, generator=generator).to(torch.int32)
        shape = (len(order), self.kv_heads, self.block_size, self.size)
        keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        # Entries past the end name a block that does not exist.
        tables = torch.full((len(lengths), max(widths) + 1), 1 << 30, dtype=torch.int32)
        for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
            tables[row, :width], order = order[:width], order[width:]
            for position in range(length):
                place = (
                    tables[row, position // self.block_size],
                    slice(None),
                    position % self.block_size,
                )
                for cache in (keys, values):
                    cache[place] = torch.randn(self.kv_heads, self.size, generator=generator)
        queries = [count for count, _ in self.sequences]
        q = torch.randn(sum(queries), self.heads, self.size, generator=generator)
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        lens = torch.tensor(lengths, dtype=torch.int32)
        decoded = sum(length for count, length in self.sequences if count == 1)
        return q, keys, values, Batch(tables, lens, starts, max(queries), max(lengths), decoded)


def check(case: Case, window: int | None = None, soft_cap: float | None = None) -> None:
    q, keys, values, batch = case.build()
    out = triton.paged_attention(q, keys, values, batch, 0.2, window, soft_cap)
    in_tables = Batch(
        batch.block_tables.where(batch.block_tables < len(keys), 0),
        batch.seq_lens,
        batch.query_start_loc,
        batch.max_query_len,
        batch.max_seq_len,
        batch.decode_tokens,
    )
    expected = reference.paged_attention(q, keys, values, in_tables, 0.2, window, soft_cap)
    # Both compute in fp32, in another order.
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


DECODES = tuple((1, length) for length in (1, 15, 16, 17, 31, 32, 33, 70))
MIXED = ((1, 9), (6, 6), (1, 33), (20, 37), (17, 17), (1, 1), (2, 18))


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1), (8, 1)], ids=str)
@pytest.mark.parametrize("sequences", [DECODES, MIXED], ids=["decode", "mixed"])
def test_query_heads_share_kv_heads(
    sequences: tuple[tuple[int, int], ...], heads: tuple[int, int]
) -> None:
    check(Case(sequences, *heads))


def test_more_query_heads_per_kv_head_than_a_tile_has_rows() -> None:
    check(Case(MIXED[:4], 17, 1))


@pytest.mark.parametrize("size", [16, 80, 96, 128, 256])
def test_head_sizes(size: int) -> None:
    check(Case(MIXED[:4], size=size))


@pytest.mark.parametrize("window", [1, 16, 17, 30, 1000])
@pytest.mark.parametrize("sequences", [DECODES, MIXED], ids=["decode", "mixed"])
def test_windows(sequences: tuple[tuple[int, int], ...], window: int) -> None:
    check(Case(sequences), window=window)


@pytest.mark.parametrize("window", [None, 20])
def test_soft_cap(window: int | None) -> None:
    check(Case(MIXED), window, soft_cap=0.7)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_block_sizes(block_size: int) -> None:
    check(Case(MIXED, block_size=block_size))


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of two tiles, and scratch memory full of NaN."""

    def full_of_nan(*args: object, **kwargs: object) -> Tensor:
        return torch.zeros(*args, **kwargs).fill_(torch.nan)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_attention, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(decode_attention.torch, "empty", full_of_nan)


SPLIT = tuple((1, length) for length in (1, 63, 64, 65, 128, 200, 300))


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("window", [None, 1, 64, 100])
def test_splits_are_merged(window: int | None) -> None:
    check(Case(SPLIT), window)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("window", [None, 70])
def test_splits_are_found_among_more_sequences_than_are_looked_at_at_once(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "_CHUNK", tl.constexpr(4))
    check(Case(((1, 70), (3, 9), *DECODES[:5], (1, 200), (5, 90), (1, 64))), window)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(
    ("sequences", "window", "programs"),
    [
        # Ten splits of the long one, and one of each that is short.
        (((1, 640), *[(1, 5)] * 15), None, 10 + 15),
        # A window that begins within a split ends within another.
        (((1, 640), (1, 5)), 100, 2 * 3),
        # Those of the prompt do not count.
        (((1, 70), (8, 640)), None, 2),
    ],
    ids=["long beside short", "window", "prompt"],
)
def test_a_long_context_does_not_start_programs_for_the_short_ones(
    sequences: tuple[tuple[int, int], ...],
    window: int | None,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grids: list[tuple[int, ...]] = []
    start = GridExecutor.__call__

    def count(executor: GridExecutor, *args: object, **kwargs: object) -> None:
        if executor.fn.__name__ == "_decode_kernel":
            grids.append(executor.grid)
        start(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", count)
    _, _, _, batch = Case(sequences, heads=2, size=16).build()
    check(Case(sequences, heads=2, size=16), window)
    assert len(grids) == 1
    # A sequence may have one split more than its tokens fill.
    assert programs <= grids[0][0] <= programs + len(batch.seq_lens)


def test_kernels_without_rows_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    for name in ("decode_attention", "prefill_attention"):
        monkeypatch.setattr(attention, name, lambda *_, name=name: started.append(name))
    for sequences in (((2, 9), (5, 5)), ((1, 9), (1, 1)), ((1, 9), (5, 5))):
        q, keys, values, batch = Case(sequences).build()
        triton.paged_attention(q, keys, values, batch, 0.2, None, None)
    assert started == [
        "prefill_attention",
        "decode_attention",
        "decode_attention",
        "prefill_attention",
    ]


@pytest.mark.usefixtures("short_splits")
def test_a_sequence_alone_and_in_company_gives_the_same_bits() -> None:
    sequences = ((1, 300), (1, 64), (1, 65), (1, 130))
    q, keys, values, batch = Case(sequences).build()
    together = triton.paged_attention(q, keys, values, batch, 0.2, None, None)
    for row, (_, length) in enumerate(sequences):
        alone = Batch(
            batch.block_tables[row : row + 1],
            batch.seq_lens[row : row + 1],
            torch.tensor([0, 1], dtype=torch.int32),
            1,
            length,
            length,
        )
        out = triton.paged_attention(q[row : row + 1], keys, values, alone, 0.2, None, None)
        assert torch.equal(out[0], together[row])


@pytest.mark.parametrize("splits", [1, 4])
def test_padded_rows_give_zeros_and_disturb_nobody(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "SPLIT_TOKENS", 64 // splits * 2)
    q, keys, values, batch = Case(((1, 40), (1, 64), (1, 1))).build()
    lens = torch.tensor([40, 0, 0], dtype=torch.int32)
    padded = Batch(batch.block_tables, lens, batch.query_start_loc, 1, 64, decode_tokens=40)
    out = triton.paged_attention(q, keys, values, padded, 0.2, None, None)
    full = triton.paged_attention(q, keys, values, batch, 0.2, None, None)
    assert torch.equal(out[0], full[0])
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))


def test_sequences_without_query_tokens_are_passed_over() -> None:
    q, keys, values, batch = Case(MIXED[:4]).build()
    # Two padded sequences behind the last.
    none = torch.zeros(2, dtype=torch.int32)
    end = batch.query_start_loc[-1:]
    padded = Batch(
        torch.cat((batch.block_tables, batch.block_tables[:2])),
        torch.cat((batch.seq_lens, none)),
        torch.cat((batch.query_start_loc, end, end)),
        batch.max_query_len,
        batch.max_seq_len,
        batch.decode_tokens,
    )
    out = triton.paged_attention(q, keys, values, padded, 0.2, None, None)
    assert torch.equal(out, triton.paged_attention(q, keys, values, batch, 0.2, None, None))


# Each head size with splits and with prompts, with a window and without; each ratio of heads.
E4M3 = [
    (Case(SPLIT, 2, 2, size=64), None, None),
    (Case(SPLIT, 6, 2, size=80), 100, None),
    (Case(SPLIT, 7, 1, size=96), None, 0.7),
    (Case(SPLIT, 8, 1, size=128), 64, None),
    (Case(SPLIT[3:], 2, 2, size=256), 1, 0.7),
    (Case(MIXED, 6, 2, size=64), 20, None),
    (Case(MIXED, 7, 1, size=80), None, None),
    (Case(MIXED, 8, 1, size=96), 17, None),
    (Case(MIXED, 2, 2, size=128), None, 0.7),
    (Case(MIXED[:4], 17, 1, size=256), None, None),
]


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(("case", "window", "soft_cap"), E4M3)
def test_e4m3_cache(case: Case, window: int | None, soft_cap: float | None) -> None:
    q, keys, values, batch = case.build()
    batch = Batch(
        batch.block_tables.where(batch.block_tables < len(keys), 0),
        batch.seq_lens,
        batch.query_start_loc,
        batch.max_query_len,
        batch.max_seq_len,
        batch.decode_tokens,
    )
    # The heads have scales that are far apart.
    factors = torch.tensor([20.0, 5.0])[: case.kv_heads]
    cache = PagedCache(
        (keys * factors[:, None, None]).to(torch.float8_e4m3fn),
        (values * 3 * factors[:, None, None]).to(torch.float8_e4m3fn),
        1 / factors,
        1 / (3 * factors),
    )
    out = triton.scaled_paged_attention(q, cache, batch, 0.2, window, soft_cap)
    expected = reference.scaled_paged_attention(q, cache, batch, 0.2, window, soft_cap)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("query_len", [1, 3])
def test_f10_addresses_beyond_two_to_the_31(
    query_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter copies every storage back onto itself, which would fill 4 GiB of memory.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    block_stride, count = 700_000_000, 4
    assert (count - 1) * block_stride < 2**31 < count * block_stride
    q, keys, values, batch = Case(((query_len, 50),), kv_heads=1, heads=2).build()
    # Pages that nothing touches cost no memory: two sets of blocks, far apart, in one buffer.
    memory = torch.empty(count * block_stride + 1_000_000, dtype=torch.float16)
    far = [
        memory[start:].as_strided((count + 1, 1, 16, 64), (block_stride, 1024, 64, 1))
        for start in (0, 500_000)
    ]
    blocks = torch.tensor([4, 0, 3, 2], dtype=torch.int32)
    for place, block in zip(blocks.tolist(), batch.block_tables[0, :4].tolist(), strict=True):
        far[0][place], far[1][place] = keys[block].half(), values[block].half()
    near = [cache.half() for cache in (keys, values)]
    far_batch = Batch(
        blocks[None],
        batch.seq_lens,
        batch.query_start_loc,
        batch.max_query_len,
        batch.max_seq_len,
        batch.decode_tokens,
    )
    out = triton.paged_attention(q.half(), *far, far_batch, 0.2, None, None)
    assert torch.equal(out, triton.paged_attention(q.half(), *near, batch, 0.2, None, None))


def test_f10_writes_beyond_two_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    memory = torch.empty((1 << 31) + 200_000, dtype=torch.float16)
    cache = memory.as_strided((3, 2, 16, 64), (1 << 30, 1024, 64, 1))
    k, v = (torch.randn(1, 2, 64).half() for _ in range(2))
    triton.write_kv_cache(k, v, cache, cache[:, :], torch.tensor([2 * 16 + 3]))
    assert torch.equal(cache[2, :, 3], v[0])


def test_wrong_arguments_are_refused() -> None:
    q, keys, values, batch = Case(((1, 4),)).build()
    with pytest.raises(ValueError, match="head size 32 over a cache of 64"):
        triton.paged_attention(q[..., :32], keys, values, batch, 0.2, None, None)
    with pytest.raises(ValueError, match="key and value cache differ"):
        triton.paged_attention(q, keys, values[:1], batch, 0.2, None, None)
    with pytest.raises(ValueError, match="do not divide"):
        triton.paged_attention(q[:, :3], keys, values, batch, 0.2, None, None)
    with pytest.raises(ValueError, match=r"cache of torch\.float16 under queries"):
        triton.paged_attention(q, keys.half(), values.half(), batch, 0.2, None, None)
