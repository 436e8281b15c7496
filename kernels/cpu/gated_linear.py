# ruff: noqa: ANN401  # Numba has no types
"""The first half of a gated MLP in one pass: act(x * gate) * (x * up), rounded as one by one."""

from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.kernels.cpu.activation import GELU, GELU_TANH, SILU, activate
from octavo.kernels.cpu.compiled import Kernel, inlined
from octavo.kernels.cpu.intrinsics import keep_alive, load_f32, load_i64, store_f32
from octavo.kernels.cpu.linear import WEIGHT_KINDS, fetch_from
from octavo.kernels.cpu.numbers import F32, round_row, store_row
from octavo.kernels.cpu.processor import MAX_ROWS, PANEL
from octavo.kernels.cpu.tile import gemm_tile

# The kernel's arguments, in this order. `inputs` holds rows as the product reads them; `out` are
# rows of even length, float32 if `wide`.
(
    _CODE,
    _INPUTS,
    _TOKENS,
    _ROW_BYTES,
    _WEIGHTS,
    _PANEL_BYTES,
    _STEPS,
    _INNER,
    _GROUP,
    _BLOCK,
    _OUT,
    _BIAS,
    _WIDE_OUT,
) = range(13)


@inlined
def _finish(code: int, tile: int, count: int, bias: int) -> None:
    """Add the bias to `count` rows of a panel and round them."""
    if bias != 0:
        for row in range(count):
            for i in range(PANEL):
                here = row * PANEL + i
                store_f32(tile, here, load_f32(tile, here) + load_f32(bias, i))
    round_row(code, tile, count * PANEL)


def _gated_kernel(kind: int, activation: int) -> Callable[[Any, Any], None]:
    """The kernel for weights of element type `kind`."""

    def gated(a: Any, chunk: Any) -> None:
        code, row_bytes, inner = load_i64(a, _CODE), load_i64(a, _ROW_BYTES), load_i64(a, _INNER)
        panel_bytes, steps, group = (
            load_i64(a, _PANEL_BYTES),
            load_i64(a, _STEPS),
            load_i64(a, _GROUP),
        )
        panels = inner // PANEL
        groups = (panels + group - 1) // group
        block = load_i64(a, _BLOCK)
        first_row = chunk // groups * block
        rows = min(block, load_i64(a, _TOKENS) - first_row)
        first_panel = chunk % groups * group
        tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
        memory = np.empty(2 * rows * PANEL, np.float32)
        gate = memory.ctypes.data
        up = gate + 4 * rows * PANEL
        stride = panel_bytes // steps
        for panel in range(first_panel, min(first_panel + group, panels)):
            for half in range(2):
                w = load_i64(a, _WEIGHTS) + (panel + half * panels) * panel_bytes
                following = load_i64(a, _WEIGHTS) + (panel + half) * panel_bytes
                following += (1 - half) * panels * panel_bytes
                for number in range(tiles):
                    begin = rows * number // tiles
                    count = rows * (number + 1) // tiles - begin
                    fetch = fetch_from(w, following, panel_bytes, number, tiles)
                    inputs = load_i64(a, _INPUTS) + (first_row + begin) * row_bytes
                    c = gate + 4 * PANEL * (half * rows + begin)
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
            bias = load_i64(a, _BIAS)
            _finish(code, gate, rows, bias + 4 * panel * PANEL if bias != 0 else 0)
            _finish(code, up, rows, bias + 4 * (panel * PANEL + inner) if bias != 0 else 0)
            for i in range(rows * PANEL):
                store_f32(gate, i, activate(activation, load_f32(gate, i)))
            round_row(code, gate, rows * PANEL)
            for i in range(rows * PANEL):
                store_f32(gate, i, load_f32(gate, i) * load_f32(up, i))
            wide = load_i64(a, _WIDE_OUT)
            size = 4 if code == F32 or wide != 0 else 2
            for row in range(rows):
                place = (first_row + row) * inner + panel * PANEL
                out = load_i64(a, _OUT) + place * size
                store_row(code, wide, gate + row * PANEL * 4, out, PANEL)
        keep_alive(memory)

    return gated


GATED_PRODUCTS = {
    (dtype, activation): Kernel(_gated_kernel(kind, activation))
    for dtype, kind in WEIGHT_KINDS.items()
    for activation in (SILU, GELU, GELU_TANH)
}
