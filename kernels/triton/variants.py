"""Calls of the public wrappers that together make every variant the server can meet.

The tensors have shapes and dtypes but no memory, so a call launches nothing and costs nothing; it
shows at the same time that no wrapper reads a value back from the device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.kernels.cache_args import PagedCache
from octavo.kernels.reference.projection import PlainWeight
from octavo.kernels.rotary_args import HeadNorm, Rotation
from octavo.kernels.sampling_args import SamplingFilters
from octavo.kernels.seeded_args import Cutoff, Penalties, SeededDraws, TokenCounts
from octavo.kernels.triton.activation import gelu_and_mul, silu_and_mul
from octavo.kernels.triton.attention import scaled_paged_attention
from octavo.kernels.triton.cutoff import find_cutoff
from octavo.kernels.triton.draw import draw_seeded
from octavo.kernels.triton.kv_cache import copy_blocks, write_kv_cache
from octavo.kernels.triton.log_sum_exp import log_sum_exp
from octavo.kernels.triton.norm import add_rms_norm, rms_norm
from octavo.kernels.triton.penalties import penalize
from octavo.kernels.triton.projection import skinny_linear
from octavo.kernels.triton.rotary import rotary_embedding, rotate_and_cache

_BLOCKS, _BLOCK_SIZE = 1000, 16


@dataclass(frozen=True, slots=True)
class Variant:
    """A named call. `may_spill` marks what is off the main path, `needs_fp8` e4m3 arithmetic."""

    name: str
    call: Callable[[], object]
    may_spill: bool = False
    needs_fp8: bool = False


@dataclass(frozen=True, slots=True)
class _Batch:
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    decode_tokens: int | None


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Attention:
    """A call of attention; `query_len` 1 is a decode step.

    `table_width` is that of the block tables, enough for `seq_len` unless given. With `offset` the
    index tensors begin so many entries behind an aligned address.
    """

    query_len: int
    head_dim: int
    group: int = 4
    kv_heads: int = 8
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    soft_cap: float | None = None
    seq_len: int = 4096
    sequences: int = 64
    table_width: int | None = None
    offset: int = 0

    def __call__(self) -> Tensor:
        sequences = self.sequences
        shape = (_BLOCKS, self.kv_heads, _BLOCK_SIZE, self.head_dim)
        dtype = self.cache_dtype or self.dtype
        scale = None
        if self.cache_dtype is not None:
            scale = _meta(self.kv_heads, dtype=torch.float32)
        cache = PagedCache(_meta(*shape, dtype=dtype), _meta(*shape, dtype=dtype), scale, scale)
        batch = _Batch(
            self._integers(sequences, self.table_width or self.seq_len // _BLOCK_SIZE),
            self._integers(sequences),
            self._integers(sequences + 1),
            self.query_len,
            self.seq_len,
            None,
        )
        q = _meta(
            sequences * self.query_len, self.kv_heads * self.group, self.head_dim, dtype=self.dtype
        )
        return scaled_paged_attention(q, cache, batch, 0.1, self.window, self.soft_cap)

    def _integers(self, *shape: int) -> Tensor:
        flat = _meta(self.offset + math.prod(shape), dtype=torch.int32)
        return flat[self.offset :].view(shape)


_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _attention_variants() -> list[Variant]:
    variants = []
    for query_len, kind in ((1, "decode"), (16, "chunk"), (1024, "prefill")):
        for size in (64, 80, 96, 128, 256):
            for dtype, name in _NAMES.items():
                call = Attention(query_len, size, dtype=dtype)
                spill = dtype == torch.float32
                variants.append(Variant(f"{kind} {size} {name}", call, may_spill=spill))
        more = {
            "128 bf16 mha": Attention(query_len, 128, group=1),
            "128 bf16 group 7": Attention(query_len, 128, group=7, kv_heads=4),
            "128 bf16 group 8": Attention(query_len, 128, group=8),
            "128 bf16 window": Attention(query_len, 128, window=1024),
            "128 bf16 soft cap": Attention(query_len, 128, soft_cap=50.0),
            "256 bf16 window, soft cap": Attention(query_len, 256, window=1024, soft_cap=50.0),
        }
        variants += [Variant(f"{kind} {name}", call) for name, call in more.items()]
        for size in (64, 128, 256):
            call = Attention(query_len, size, cache_dtype=torch.float8_e4m3fn)
            variants.append(Variant(f"{kind} {size} bf16 e4m3", call, needs_fp8=True))
    variants.append(Variant("decode 128 bf16 one pass", Attention(1, 128, seq_len=512)))
    return variants


def _rotate_and_cache(
    dtype: torch.dtype, cache_dtype: torch.dtype, size: int, norm: bool
) -> Tensor:
    tokens, q_heads, kv_heads = 64, 32, 8
    qkv = _meta(tokens, q_heads + 2 * kv_heads, size, dtype=dtype)
    q, k, v = qkv.split((q_heads, kv_heads, kv_heads), dim=1)
    shape = (_BLOCKS, kv_heads, _BLOCK_SIZE, size)
    scale = None if cache_dtype == dtype else _meta(kv_heads, dtype=torch.float32)
    cache = PagedCache(
        _meta(*shape, dtype=cache_dtype), _meta(*shape, dtype=cache_dtype), scale, scale
    )
    integer = _meta(tokens, dtype=torch.int64)
    weight = _meta(size, dtype=dtype)
    return rotate_and_cache(
        q,
        k,
        v,
        HeadNorm(weight, weight, 1e-6) if norm else None,
        Rotation(integer, _meta(4096, size, dtype=torch.float32)),
        cache,
        integer,
    )


def _cache_ops(dtype: torch.dtype) -> None:
    k, cache = _meta(64, 8, 128, dtype=dtype), _meta(_BLOCKS, 8, _BLOCK_SIZE, 128, dtype=dtype)
    slots = _meta(64, dtype=torch.int64)
    write_kv_cache(k, k, cache, cache, slots)
    copy_blocks(cache, cache, slots, slots)
    rotary_embedding(k, k, slots, _meta(4096, 128, dtype=torch.float32))


def _row_ops(dtype: torch.dtype) -> None:
    for size in (1024, 4096, 16384):
        x, weight = _meta(64, size, dtype=dtype), _meta(size, dtype=dtype)
        rms_norm(x, weight, 1e-5)
        add_rms_norm(x, x, weight, 1e-5)
    gate_up = _meta(64, 2 * 14336, dtype=dtype)
    silu_and_mul(gate_up)
    gelu_and_mul(gate_up, tanh=True)
    gelu_and_mul(gate_up, tanh=False)


def _skinny(dtype: torch.dtype) -> None:
    for columns, depth in ((4096, 4096), (1024, 3200)):
        packed = PlainWeight(_meta(columns, depth, dtype=dtype), None)
        skinny_linear(_meta(1, depth, dtype=dtype), packed)


def _sampling() -> None:
    rows, size = 64, 151936
    single = partial(_meta, dtype=torch.float32)
    double, long, integer = (
        _meta(rows, dtype=dtype) for dtype in (torch.float64, torch.int64, torch.int32)
    )
    logits = single(rows, size)
    counts = TokenCounts(
        long,
        _meta(300, size // 32, dtype=torch.int32),
        _meta(300, size, dtype=torch.int16),
    )
    penalize(logits, counts, Penalties(single(rows), single(rows), single(rows)))
    find_cutoff(logits, long, SamplingFilters(single(rows), double, long, double))
    draws = SeededDraws(long, single(rows), long)
    draw_seeded(logits, draws, None)
    draw_seeded(logits, draws, Cutoff(single(rows), integer))
    log_sum_exp(logits)


def _other_variants() -> list[Variant]:
    variants = [Variant("sampling", _sampling)]
    for dtype, name in _NAMES.items():
        variants += [
            Variant(f"rows {name}", partial(_row_ops, dtype)),
            Variant(f"cache {name}", partial(_cache_ops, dtype)),
            Variant(f"rotate {name}", partial(_rotate_and_cache, dtype, dtype, 128, False)),
            Variant(f"rotate, norm {name}", partial(_rotate_and_cache, dtype, dtype, 80, True)),
        ]
        if dtype != torch.float32:
            variants.append(Variant(f"skinny linear {name}", partial(_skinny, dtype)))
    fp8 = partial(_rotate_and_cache, torch.bfloat16, torch.float8_e4m3fn, 128, True)
    variants.append(Variant("rotate, norm bf16 e4m3", fp8, needs_fp8=True))
    return variants


VARIANTS = _attention_variants() + _other_variants()
