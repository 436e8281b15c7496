"""Calls of every kernel at a model's sizes, through the one door to them.

Counted per call: the bytes of operands read and results written once, and the multiplications and
additions that the definition of the op needs. T tokens, S sequences.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from octavo.config.model import ModelConfig
from octavo.kernels import ops
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.rotary_args import Rotation
from octavo.kernels.sampling_args import SamplingFilters
from octavo.kernels.seeded_args import SeededDraws

# A layer's weights and cache have left every processor cache by the time they are read again, so
# that copies of them are used in turn, of this size in all.
_COLD_BYTES = 1 << 27
_MOST_COPIES = 128
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One op at one shape."""

    name: str
    shape: str
    num_bytes: int
    num_operations: int
    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Batch:
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    decode_tokens: int


class KernelCases:
    """Makes operands of random numbers, and the cases that use them."""

    def __init__(
        self,
        facts: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        int8: bool = False,
    ) -> None:
        self._facts = facts
        self._dtype = dtype
        self._device = device
        self._block_size = block_size
        self._int8 = int8
        self._generator = torch.Generator(device).manual_seed(0)

    def linear(self, token_counts: Sequence[int]) -> Iterator[KernelCase]:
        """Every projection of the model, each for all numbers of tokens.

        With `int8` also those with int8 weights.
        """
        facts = self._facts
        queries = facts.num_heads * facts.head_dim
        projections = {
            "linear qkv": (queries + 2 * facts.num_kv_heads * facts.head_dim, facts.hidden_size),
            "linear out": (facts.hidden_size, queries),
            "linear gate_up": (2 * facts.intermediate_size, facts.hidden_size),
            "linear down": (facts.hidden_size, facts.intermediate_size),
            "linear head": (facts.vocab_size, facts.hidden_size),
        }
        for name, (rows, columns) in projections.items():
            yield from self._products(name, (rows, columns), token_counts, int8=False)
            if self._int8:
                yield from self._products(f"{name} int8", (rows, columns), token_counts, int8=True)

    def _products(
        self, name: str, shape: tuple[int, int], token_counts: Sequence[int], *, int8: bool
    ) -> Iterator[KernelCase]:
        rows, columns = shape
        weight = self._random(rows, columns)
        size = self._bytes(weight.numel())
        if int8:
            size = int(weight.numel() * ops.INT8_WEIGHT_BYTES)
        with ops.int8_weights() if int8 else nullcontext():
            packed = [ops.pack_linear(weight.clone()) for _ in range(self._num_copies(size))]
        weights = cycle(packed)
        for count in token_counts:
            x = self._random(count, columns)
            yield KernelCase(
                name,
                f"T={count} {columns}->{rows}",
                size + self._bytes(count * (rows + columns)),
                2 * count * rows * columns,
                lambda x=x, weights=weights: ops.linear(x, next(weights)),  # type: ignore[misc]
            )

    def elementwise(self, num_tokens: int) -> Iterator[KernelCase]:
        """Embedding, norms and activation."""
        facts = self._facts
        width, inner = facts.hidden_size, facts.intermediate_size
        shape = f"T={num_tokens} {width}"
        table = self._random(facts.vocab_size, width)
        ids = self._integers(facts.vocab_size, num_tokens)
        x, residual = self._random(num_tokens, width), self._random(num_tokens, width)
        weight, gate_up = self._random(width), self._random(num_tokens, 2 * inner)
        size = num_tokens * width
        yield KernelCase(
            "embedding", shape, self._bytes(2 * size), 0, lambda: ops.embedding(ids, table)
        )
        yield KernelCase(
            *("rms_norm", shape, self._bytes(2 * size), 4 * size),
            lambda: ops.rms_norm(x, weight, _EPS),
        )
        yield KernelCase(
            *("add_rms_norm", shape, self._bytes(4 * size), 5 * size),
            lambda: ops.add_rms_norm(x, residual, weight, _EPS),
        )
        yield KernelCase(
            *("silu_and_mul", f"T={num_tokens} {inner}"),
            *(self._bytes(3 * num_tokens * inner), 5 * num_tokens * inner),
            lambda: ops.silu_and_mul(gate_up),
        )

    def rotation(self, num_tokens: int) -> Iterator[KernelCase]:
        """Rotation and cache write, alone and in one call."""
        facts, size = self._facts, self._block_size
        q = self._random(num_tokens, facts.num_heads, facts.head_dim)
        k = self._random(num_tokens, facts.num_kv_heads, facts.head_dim)
        v = torch.randn_like(k)
        positions = torch.arange(num_tokens, device=self._device)
        table = self._random(num_tokens, facts.rope.rotary_dim).float()
        cache = self._cache(-(-num_tokens // size))
        rotation = Rotation(positions, table)
        shape = f"T={num_tokens} {facts.num_heads}/{facts.num_kv_heads} heads of {facts.head_dim}"
        heads, stored = q.numel() + k.numel(), 2 * k.numel()
        table_bytes = table.numel() * table.itemsize
        yield KernelCase(
            *("rotary_embedding", shape, self._bytes(2 * heads) + table_bytes, 3 * heads),
            lambda: ops.rotary_embedding(q, k, positions, table),
        )
        yield KernelCase(
            *("write_kv_cache", shape, self._bytes(2 * stored), 0),
            lambda: ops.write_kv_cache(k, v, cache.key, cache.value, positions),
        )
        yield KernelCase(
            *("rotate_and_cache", shape, self._bytes(2 * q.numel() + 2 * stored) + table_bytes),
            3 * heads,
            lambda: ops.rotate_and_cache(q, k, v, None, rotation, cache, positions),
        )

    def attention(self, num_seqs: int, query_len: int, context: int) -> Iterator[KernelCase]:
        """Attention of the last `query_len` tokens of contexts of `context` tokens."""
        facts = self._facts
        blocks_each = -(-context // self._block_size)
        num_blocks = num_seqs * blocks_each
        cached = 2 * num_seqs * context * facts.num_kv_heads * facts.head_dim
        first = self._cache(num_blocks)
        copies = self._num_copies(self._bytes(cached))
        caches = cycle([PagedCache(first.key.clone(), first.value.clone()) for _ in range(copies)])
        order = torch.randperm(num_blocks, generator=self._generator, device=self._device)
        starts = torch.arange(num_seqs + 1, device=self._device) * query_len
        batch = _Batch(
            order.to(torch.int32).view(num_seqs, blocks_each),
            torch.full((num_seqs,), context, dtype=torch.int32, device=self._device),
            starts.to(torch.int32),
            query_len,
            context,
            num_seqs * context if query_len == 1 else 0,
        )
        q = self._random(num_seqs * query_len, facts.num_heads, facts.head_dim)
        seen = query_len * context - query_len * (query_len - 1) // 2
        scale = facts.head_dim**-0.5

        def call() -> Tensor:
            cache = next(caches)
            return ops.paged_attention(q, cache.key, cache.value, batch, scale)

        yield KernelCase(
            "attention decode" if query_len == 1 else "attention prefill",
            f"S={num_seqs} T={num_seqs * query_len} context {context}",
            self._bytes(cached + 2 * q.numel()),
            4 * num_seqs * seen * facts.num_heads * facts.head_dim,
            call,
        )

    def copies(self, num_blocks: int) -> Iterator[KernelCase]:
        """Copies of blocks within a cache."""
        cache = self._cache(2 * num_blocks)
        src = torch.arange(num_blocks, device=self._device)
        dst = src + num_blocks
        yield KernelCase(
            "copy_blocks",
            f"{num_blocks} blocks of {self._block_size}",
            # Both tensors, half of their blocks read and half written.
            2 * cache.key.numel() * cache.key.itemsize,
            0,
            lambda: ops.copy_blocks(cache.key, cache.value, src, dst),
        )

    def sampling(self, num_seqs: int) -> Iterator[KernelCase]:
        """Draws from logits; every one has to read them once."""
        vocab = self._facts.vocab_size
        logits = 4 * self._random(num_seqs, vocab).float()
        rows = torch.arange(num_seqs, device=self._device)
        temperature = torch.ones(num_seqs, device=self._device)
        uniforms = torch.rand(
            num_seqs, dtype=torch.float64, generator=self._generator, device=self._device
        )
        wide = torch.ones_like(uniforms)
        filters = SamplingFilters(temperature, 0 * wide, torch.zeros_like(rows), 0.9 * wide)
        draws = SeededDraws(rows, temperature, rows + 1)
        tokens = self._integers(vocab, num_seqs)
        calls: dict[str, Callable[[], object]] = {
            "argmax": lambda: ops.argmax(logits),
            "draw": lambda: ops.draw(logits, rows, temperature, uniforms),
            "draw_filtered top_p": lambda: ops.draw_filtered(logits, rows, filters, uniforms),
            "score_tokens": lambda: ops.score_tokens(logits, tokens, 5),
        }
        if self._device.type == "cuda":
            calls["draw_seeded top_p"] = lambda: ops.draw_seeded(
                logits, draws, ops.find_cutoff(logits, rows, filters)
            )
        size = num_seqs * vocab
        for name, call in calls.items():
            yield KernelCase(name, f"S={num_seqs} {vocab}", 4 * size, size, call)

    def _num_copies(self, num_bytes: int) -> int:
        return max(1, min(math.ceil(_COLD_BYTES / num_bytes), _MOST_COPIES))

    def _bytes(self, numbers: int) -> int:
        return numbers * self._dtype.itemsize

    def _random(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self._generator, device=self._device)
        return values.to(self._dtype)

    def _integers(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self._generator, device=self._device)

    def _cache(self, num_blocks: int) -> PagedCache:
        facts = self._facts
        shape = (num_blocks, facts.num_kv_heads, self._block_size, facts.head_dim)
        return PagedCache(self._random(*shape), self._random(*shape))
