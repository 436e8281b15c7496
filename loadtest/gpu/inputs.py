"""Random inputs of the attention kernels, and the clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.engine.attention.metadata import AttentionMetadata
from octavo.loadtest.gpu.shapes import Heads

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """Attention of sequences with `query_len` tokens each at the end of `seq_lens`."""

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: AttentionMetadata
    scale: float


def make_case(
    seq_lens: list[int], query_len: int, heads: Heads, device: str, dtype: torch.dtype
) -> Case:
    """Blocks are dealt in random order; the rest of the cache is NaN."""
    generator = torch.Generator(device).manual_seed(len(seq_lens) + query_len + heads.size)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    width = -(-max(seq_lens) // BLOCK_SIZE)
    needed = [-(-length // BLOCK_SIZE) for length in seq_lens]
    order = torch.randperm(sum(needed) + 3, generator=generator, device=device)
    tables = torch.zeros(len(seq_lens), width, dtype=torch.int32, device=device)
    caches = [random(len(order), heads.kv, BLOCK_SIZE, heads.size) for _ in range(2)]
    start = 0
    for row, (count, length) in enumerate(zip(needed, seq_lens, strict=True)):
        blocks = order[start : start + count]
        tables[row, :count] = blocks.int()
        start += count
        if length % BLOCK_SIZE:
            for cache in caches:
                cache[blocks[-1], :, length % BLOCK_SIZE :] = torch.nan
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=device) * query_len
    tokens = len(seq_lens) * query_len
    batch = AttentionMetadata(
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        block_tables=tables,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        query_start_loc=starts,
        max_query_len=query_len,
        max_seq_len=max(seq_lens),
    )
    q = random(tokens, heads.query, heads.size)
    return Case(q, caches[0], caches[1], batch, heads.size**-0.5)


def seconds(action: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of `action` on the device; the first runs compile and are left out."""
    for _ in range(3):
        action()
    times: list[float] = []
    for _ in range(repeats):
        if device == "cuda":
            begin, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            begin.record()
            action()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            action()
            times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]
