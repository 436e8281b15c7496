# ruff: noqa: ANN401  # Numba has no types
"""Linear layers over weights packed once at load.

Threads share the weight's panels of output features, in groups of about 64 KiB. For more
tokens than fit the cache, blocks of tokens times groups of panels. Few tokens run at the speed
of memory; then the last pass over a panel prefetches the next one.

A product reads rows of an even length: float32, or bfloat16 where the processor multiplies pairs
of those, and quantized ones for int8 weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu.compiled import Kernel, inlined
from octavo.kernels.cpu.intrinsics import (
    copy_bytes,
    keep_alive,
    load_f32,
    load_i64,
    store_bf16,
    store_f32,
)
from octavo.kernels.cpu.memory import weight_memory
from octavo.kernels.cpu.numbers import BF16, CODES, F32, store_row, widen_row
from octavo.kernels.cpu.pool import shared_pool
from octavo.kernels.cpu.processor import HAS_BF16_DOT, MAX_ROWS, PANEL
from octavo.kernels.cpu.quantize import (
    int8_panels,
    quantize_all,
    quantize_rows,
    quantized_row_bytes,
)
from octavo.kernels.cpu.scratch import scratch
from octavo.kernels.cpu.tile import INT8, gemm_tile, rows_code

_CHUNK_BYTES = 65536
# A block of tokens has to stay in the level-2 cache beside a panel.
_BLOCK_BYTES = 196608
_PREFETCH_BYTES = 1024
_PREPARED_ALONE = 65536


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] in panels, with zero rows and columns where N or K do not fill them.

    The element type of `panels` says in which form; int8 are the whole numbers of a quantized one.
    What a call needs of the tensors is looked up once: that takes longer than a small product.
    """

    panels: Tensor
    bias: Tensor | None
    num_outputs: int
    num_inputs: int
    address: int
    bias_address: int
    num_panels: int
    panel_bytes: int
    steps: int  # rows of a stored panel, or groups
    row_bytes: int  # of activations as the product reads them


def padded_row_bytes(dtype: torch.dtype, columns: int) -> int:
    """Bytes of a row as products with weights of `dtype`, which is no int8, read it."""
    return (columns + columns % 2) * (2 if rows_code(CODES[dtype]) == BF16 else 4)


def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedWeight:
    """See `octavo.kernels.ops.pack_linear`."""
    rows, columns = weight.shape
    depth = 2 if weight.dtype == torch.bfloat16 else 1
    padded = torch.nn.functional.pad(weight.detach(), (0, -columns % depth, 0, -rows % PANEL))
    # What lies side by side in a panel moves as one number, which is several times as fast.
    wide = padded.contiguous().view(torch.int32) if depth == 2 else padded
    by_panel = wide.view(wide.shape[0] // PANEL, PANEL, -1).transpose(1, 2)
    memory = weight_memory.empty(tuple(by_panel.shape), wide.dtype).copy_(by_panel)
    panels = memory.view(weight.dtype).view(*by_panel.shape, depth)
    return _packed(weight, bias, panels, padded_row_bytes(weight.dtype, columns))


def pack_int8_linear(weight: Tensor, bias: Tensor | None) -> PackedWeight:
    """See `octavo.kernels.ops.int8_weights`."""
    return _packed(weight, bias, int8_panels(weight), quantized_row_bytes(weight.shape[1]))


def _packed(weight: Tensor, bias: Tensor | None, panels: Tensor, row_bytes: int) -> PackedWeight:
    rows, columns = weight.shape
    wide_bias = None
    if bias is not None:
        wide_bias = torch.nn.functional.pad(bias.detach().float(), (0, -rows % PANEL))
    count, steps = panels.shape[:2]
    return PackedWeight(
        panels=panels,
        bias=wide_bias,
        num_outputs=rows,
        num_inputs=columns,
        address=panels.data_ptr(),
        bias_address=0 if wide_bias is None else wide_bias.data_ptr(),
        num_panels=count,
        panel_bytes=panels[0].numel() * panels.itemsize,
        steps=steps,
        row_bytes=row_bytes,
    )


def linear(x: Tensor, packed: PackedWeight, wide: bool = False) -> Tensor:
    """See `octavo.kernels.ops.linear`, and `logits` for what is `wide`."""
    x = x.contiguous()
    tokens, columns = x.shape
    if columns != packed.num_inputs:
        raise ValueError(f"linear: {columns} inputs, the weight has {packed.num_inputs}")
    kind = packed.panels.dtype
    if kind not in (x.dtype, torch.int8):
        raise ValueError(f"linear: inputs of {x.dtype}, the weight has {kind}")
    out_dtype = torch.float32 if wide else x.dtype
    out = x.new_empty((tokens, packed.num_outputs), dtype=out_dtype)
    if tokens == 0:
        return out
    code, first = CODES[x.dtype], 0
    pool = shared_pool()
    if kind != torch.int8 and columns * x.itemsize == packed.row_bytes:
        rows = x.data_ptr()
    elif tokens * columns <= _PREPARED_ALONE:
        rows = scratch(tokens * packed.row_bytes)
        first = (quantize_all if kind == torch.int8 else _pad_all).address
    else:
        rows = scratch(tokens * packed.row_bytes)
        prepare = quantize_rows if kind == torch.int8 else _pad_rows
        together = -(-_PREPARED_ALONE // (2 * columns))
        chunks = -(-tokens // together)
        pool.run(prepare, chunks, x.data_ptr(), code, rows, tokens, columns, together)
    group, block = chunk_shape(packed)
    groups = -(-packed.num_panels // group)
    pool.run(
        PRODUCTS[kind],
        groups * -(-tokens // block),
        x.data_ptr(),
        code,
        rows,
        tokens,
        columns,
        packed.row_bytes,
        packed.address,
        packed.panel_bytes,
        packed.steps,
        packed.num_panels,
        group,
        block,
        out.data_ptr(),
        packed.num_outputs,
        packed.bias_address,
        int(wide),
        first=first,
    )
    return out


def chunk_shape(packed: PackedWeight) -> tuple[int, int]:
    """(panels, tokens) of a chunk of work."""
    tokens = _BLOCK_BYTES // packed.row_bytes // MAX_ROWS * MAX_ROWS
    return max(1, _CHUNK_BYTES // packed.panel_bytes), max(MAX_ROWS, tokens)


@inlined
def _pad(x: int, code: int, out: int, columns: int, first: int, end: int) -> None:
    padded = columns + columns % 2
    size = 4 if code == F32 else 2
    for row in range(first, end):
        source = x + row * columns * size
        if HAS_BF16_DOT and code == BF16:
            target = out + row * padded * 2
            copy_bytes(target, source, columns * 2)
            if padded > columns:
                store_bf16(target, columns, np.float32(0))
        else:
            target = out + row * padded * 4
            widen_row(code, source, target, columns)
            if padded > columns:
                store_f32(target, columns, np.float32(0))


def _pad_all_kernel(a: int, chunk: int) -> None:
    """All tokens as a product reads them."""
    _pad(load_i64(a, 0), load_i64(a, 1), load_i64(a, 2), load_i64(a, 4), 0, load_i64(a, 3))


def _pad_rows_kernel(a: int, chunk: int) -> None:
    """A chunk of tokens as a product reads them."""
    rows = load_i64(a, 5)
    end = min(load_i64(a, 3), (chunk + 1) * rows)
    _pad(load_i64(a, 0), load_i64(a, 1), load_i64(a, 2), load_i64(a, 4), chunk * rows, end)


@inlined
def fetch_from(panel: int, following: int, panel_bytes: int, number: int, tiles: int) -> int:
    """Where tile `number` of a panel begins to prefetch.

    The tiles of a panel share the next one, so that memory is as busy in each of them; a single
    tile runs at the speed of memory and fetches what it needs soon.
    """
    if tiles == 1:
        return panel + _PREFETCH_BYTES
    return following + panel_bytes * number // tiles


def _product_kernel(kind: int) -> Callable[[Any, Any], None]:
    """The kernel for weights of element type `kind`."""

    def product(a: Any, chunk: Any) -> None:
        code, tokens, row_bytes = load_i64(a, 1), load_i64(a, 3), load_i64(a, 5)
        panel_bytes, steps, panels = load_i64(a, 7), load_i64(a, 8), load_i64(a, 9)
        group, block, outputs, bias = (
            load_i64(a, 10),
            load_i64(a, 11),
            load_i64(a, 13),
            load_i64(a, 14),
        )
        wide = load_i64(a, 15)
        size = 4 if code == F32 or wide != 0 else 2
        stride = panel_bytes // steps
        groups = (panels + group - 1) // group
        first_row = chunk // groups * block
        rows = min(block, tokens - first_row)
        first_panel = chunk % groups * group
        # Tiles of equal height: two of four rows beat one of five and one of three.
        tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
        tile = np.empty(MAX_ROWS * PANEL, np.float32)
        c = tile.ctypes.data
        for panel in range(first_panel, min(first_panel + group, panels)):
            w = load_i64(a, 6) + panel * panel_bytes
            width = min(PANEL, outputs - panel * PANEL)
            for number in range(tiles):
                begin = first_row + rows * number // tiles
                count = first_row + rows * (number + 1) // tiles - begin
                fetch = fetch_from(w, w + panel_bytes, panel_bytes, number, tiles)
                inputs = load_i64(a, 2) + begin * row_bytes
                gemm_tile(
                    kind,
                    0,
                    count,
                    inputs,
                    row_bytes,
                    w,
                    stride,
                    steps,
                    fetch,
                    stride // tiles,
                    c,
                    4 * PANEL,
                )
                out = load_i64(a, 12) + (begin * outputs + panel * PANEL) * size
                for row in range(count):
                    source = c + row * 4 * PANEL
                    target = out + row * outputs * size
                    if bias != 0:
                        for i in range(PANEL):
                            total = load_f32(source, i) + load_f32(bias, panel * PANEL + i)
                            store_f32(source, i, total)
                    if width == PANEL:
                        store_row(code, wide, source, target, PANEL)
                    else:
                        store_row(code, wide, source, target, width)
        keep_alive(tile)

    return product


_pad_all = Kernel(_pad_all_kernel)
_pad_rows = Kernel(_pad_rows_kernel)
WEIGHT_KINDS = {**CODES, torch.int8: INT8}
PRODUCTS = {dtype: Kernel(_product_kernel(kind)) for dtype, kind in WEIGHT_KINDS.items()}
