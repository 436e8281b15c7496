# ruff: noqa: ANN401  # Numba has no types
"""Storing keys and values in their rows of the paged cache."""

from typing import Any

from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu.compiled import Kernel
from octavo.kernels.cpu.intrinsics import copy_bytes, load_i64
from octavo.kernels.cpu.numbers import token_rows
from octavo.kernels.cpu.pool import report, shared_pool

_CHUNK_BYTES = 65536


def write_kv_cache(
    k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """See `octavo.kernels.ops.write_kv_cache`."""
    if k.dtype != key_cache.dtype:
        reference.write_kv_cache(k, v, key_cache, value_cache, slot_mapping)
        return
    k, v, slot_mapping = token_rows(k), token_rows(v), slot_mapping.contiguous()
    tokens, heads, size = k.shape
    blocks, _, block_size, _ = key_cache.shape
    head_bytes = size * k.itemsize
    per_chunk = max(1, _CHUNK_BYTES // (heads * head_bytes))
    wrong = shared_pool().run(
        _write,
        -(-tokens // per_chunk),
        k.data_ptr(),
        k.stride(0) * k.itemsize,
        v.data_ptr(),
        v.stride(0) * v.itemsize,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        tokens,
        heads,
        head_bytes,
        block_size,
        blocks * block_size,
        per_chunk,
    )
    if wrong:
        raise IndexError(f"write_kv_cache: a slot is not below {blocks * block_size}")


def _write_kernel(a: Any, chunk: Any) -> None:
    heads, head_bytes, block_size = load_i64(a, 8), load_i64(a, 9), load_i64(a, 10)
    per_chunk = load_i64(a, 12)
    for token in range(chunk * per_chunk, min((chunk + 1) * per_chunk, load_i64(a, 7))):
        slot = load_i64(load_i64(a, 6), token)
        if slot >= load_i64(a, 11):
            report(a, 1)
        elif slot >= 0:
            block, row = slot // block_size, slot % block_size
            for head in range(heads):
                target = ((block * heads + head) * block_size + row) * head_bytes
                source = token * load_i64(a, 1) + head * head_bytes
                copy_bytes(load_i64(a, 4) + target, load_i64(a, 0) + source, head_bytes)
                source = token * load_i64(a, 3) + head * head_bytes
                copy_bytes(load_i64(a, 5) + target, load_i64(a, 2) + source, head_bytes)


_write = Kernel(_write_kernel)
