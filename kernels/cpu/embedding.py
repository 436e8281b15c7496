# ruff: noqa: ANN401  # Numba has no types
"""Rows of the embedding table."""

from typing import Any

from octavo.kernels.cpu.compiled import Kernel
from octavo.kernels.cpu.intrinsics import copy_bytes, load_i64
from octavo.kernels.cpu.pool import report

# The kernel's arguments, in this order.
(_IDS, _TABLE, _TABLE_ROWS, _ROW_BYTES, _TOKENS, _PER_CHUNK, _OUT) = range(7)


def _embedding_kernel(a: Any, chunk: Any) -> None:
    per_chunk, row_bytes = load_i64(a, _PER_CHUNK), load_i64(a, _ROW_BYTES)
    for token in range(chunk * per_chunk, min((chunk + 1) * per_chunk, load_i64(a, _TOKENS))):
        row = load_i64(load_i64(a, _IDS), token)
        if row < 0 or row >= load_i64(a, _TABLE_ROWS):
            report(a, 1)
        else:
            source = load_i64(a, _TABLE) + row * row_bytes
            copy_bytes(load_i64(a, _OUT) + token * row_bytes, source, row_bytes)


embedding_kernel = Kernel(_embedding_kernel)
