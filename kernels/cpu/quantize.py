# ruff: noqa: ANN401  # Numba has no types
"""Weights and activations as whole numbers with scales; `int8_tile` says in which form."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu.compiled import Kernel, inlined
from octavo.kernels.cpu.int8_tile import (
    GROUP,
    ROW_GROUP_BYTES,
    WEIGHT_GROUP_BYTES,
    quantize_group,
)
from octavo.kernels.cpu.intrinsics import keep_alive, load_i64, store_f32
from octavo.kernels.cpu.memory import weight_memory
from octavo.kernels.cpu.numbers import F32, widen_row
from octavo.kernels.cpu.processor import PANEL

_LARGEST = 127
# Weights are widened in parts of so many panels: a head can have more than a hundred thousand rows.
_PANELS_AT_ONCE = 64


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers int8 [N, K / 32, 32] and bfloat16 scales [N, K / 32] of `weight` [N, K].

    K is a multiple of 32. A scale is the largest magnitude of the group / 127; weight is number
    times scale.
    """
    groups = weight.detach().float().view(weight.shape[0], -1, GROUP)
    scales = (groups.abs().amax(2) / _LARGEST).bfloat16()
    divisors = torch.where(scales == 0, 1, scales.float())
    numbers = (groups / divisors[..., None]).round_().clamp_(-_LARGEST, _LARGEST)
    return numbers.to(torch.int8), scales


def int8_panels(weight: Tensor) -> Tensor:
    """`weight` [N, K] as int8 [N / PANEL, K / 32, bytes of a group of a panel], padded by zeros."""
    rows, columns = weight.shape
    shape = (-(-rows // PANEL), -(-columns // GROUP), WEIGHT_GROUP_BYTES)
    panels = weight_memory.empty(shape, torch.int8)
    for first in range(0, shape[0], _PANELS_AT_ONCE):
        part = weight.detach()[first * PANEL : (first + _PANELS_AT_ONCE) * PANEL]
        padding = (0, -columns % GROUP, 0, -part.shape[0] % PANEL)
        numbers, scales = quantize_weight(torch.nn.functional.pad(part, padding))
        target = panels[first : first + _PANELS_AT_ONCE]
        by_step = numbers.view(-1, PANEL, shape[1], GROUP // 2, 2).permute(0, 2, 3, 1, 4)
        target[..., : GROUP * PANEL] = by_step.flatten(2)
        by_panel = scales.view(-1, PANEL, shape[1]).transpose(1, 2).contiguous()
        target[..., GROUP * PANEL :] = by_panel.view(torch.int8)
    return panels


def quantized_row_bytes(columns: int) -> int:
    """Bytes of a row of activations."""
    return -(-columns // GROUP) * ROW_GROUP_BYTES


@inlined
def _quantize(x: int, code: int, out: int, columns: int, first: int, end: int) -> None:
    group_of_32 = np.empty(GROUP, np.float32)
    wide = group_of_32.ctypes.data
    groups = (columns + GROUP - 1) // GROUP
    size = 4 if code == F32 else 2
    for row in range(first, end):
        for group in range(groups):
            begin = group * GROUP
            count = min(GROUP, columns - begin)
            source = x + (row * columns + begin) * size
            target = out + (row * groups + group) * ROW_GROUP_BYTES
            if code == F32 and count == GROUP:
                quantize_group(source, target)
                continue
            widen_row(code, source, wide, count)
            for i in range(count, GROUP):
                store_f32(wide, i, np.float32(0))
            quantize_group(wide, target)
    keep_alive(group_of_32)


def _quantize_all_kernel(a: Any, chunk: Any) -> None:
    """All tokens."""
    _quantize(load_i64(a, 0), load_i64(a, 1), load_i64(a, 2), load_i64(a, 4), 0, load_i64(a, 3))


def _quantize_rows_kernel(a: Any, chunk: Any) -> None:
    """A chunk of tokens."""
    rows = load_i64(a, 5)
    end = min(load_i64(a, 3), (chunk + 1) * rows)
    _quantize(load_i64(a, 0), load_i64(a, 1), load_i64(a, 2), load_i64(a, 4), chunk * rows, end)


# Arguments: rows [T, K] and their element type, quantized rows, T, K, tokens of a chunk.
quantize_all = Kernel(_quantize_all_kernel)
quantize_rows = Kernel(_quantize_rows_kernel)
