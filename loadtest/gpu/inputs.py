"""Random inputs of the attention kernels."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.engine.attention.metadata import AttentionMetadata
from octavo.engine.attention.scales import e4m3_scales
from octavo.kernels import ops
from octavo.kernels.cache_args import PagedCache
from octavo.loadtest.gpu.shapes import Heads, Plan

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """Attention of sequences with `query_len` tokens each at the end of `seq_lens`."""

    q: Tensor
    cache: PagedCache
    batch: AttentionMetadata
    scale: float

    def attend(self, window: int | None = None) -> Tensor:
        """What is measured and checked: [T, Hq, D]."""
        return ops.scaled_paged_attention(self.q, self.cache, self.batch, self.scale, window)

    def in_fp8(self) -> "Case":
        """The same with a cache in e4m3."""
        key, key_scale = _in_fp8(self.cache.key)
        value, value_scale = _in_fp8(self.cache.value)
        return replace(self, cache=PagedCache(key, value, key_scale, value_scale))


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
        decode_tokens=sum(seq_lens) if query_len == 1 else 0,
    )
    q = random(tokens, heads.query, heads.size)
    return Case(q, PagedCache(caches[0], caches[1]), batch, heads.size**-0.5)


def cases_of(plan: Plan, case: Case) -> list[tuple[str, Case]]:
    """`case`, and where there are kernels for it the same with a cache in e4m3, named."""
    fp8 = plan.device == "cpu" or ops.reads_fp8(torch.device(plan.device))
    return [("", case), (" fp8", case.in_fp8())] if fp8 else [("", case)]


def _in_fp8(cache: Tensor) -> tuple[Tensor, Tensor]:
    bounds = cache.float().nan_to_num(0.0).abs().amax(dim=(0, 2))
    scales = e4m3_scales(bounds)
    return (cache.float() / scales[:, None, None]).to(torch.float8_e4m3fn), scales
