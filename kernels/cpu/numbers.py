"""Element types as the kernels see them, and conversion of rows to and from float32."""

import struct
from functools import lru_cache

import torch
from torch import Tensor

from octavo.kernels.cpu.compiled import inlined
from octavo.kernels.cpu.intrinsics import (
    load_bf16,
    load_f16,
    load_f32,
    round_bf16,
    round_f16,
    store_bf16,
    store_f16,
    store_f32,
)

BF16, F16, F32 = 0, 1, 2

CODES = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}


@lru_cache(maxsize=256)
def float_bits(value: float) -> int:
    """A float32 argument of a kernel, passed by its bits; `bits_to_f32` reads it."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


@inlined
def widen_row(code: int, source: int, target: int, count: int) -> None:
    """target[:count] = source[:count] in float32. Addresses, as everywhere here."""
    if code == BF16:
        for i in range(count):
            store_f32(target, i, load_bf16(source, i))
    elif code == F16:
        for i in range(count):
            store_f32(target, i, load_f16(source, i))
    else:
        for i in range(count):
            store_f32(target, i, load_f32(source, i))


@inlined
def narrow_row(code: int, source: int, target: int, count: int) -> None:
    """target[:count] = float32 source[:count], rounded once."""
    if code == BF16:
        for i in range(count):
            store_bf16(target, i, load_f32(source, i))
    elif code == F16:
        for i in range(count):
            store_f16(target, i, load_f32(source, i))
    else:
        for i in range(count):
            store_f32(target, i, load_f32(source, i))


@inlined
def round_row(code: int, row: int, count: int) -> None:
    """Round float32 row[:count] to the values that the element type can hold."""
    if code == BF16:
        for i in range(count):
            store_f32(row, i, round_bf16(load_f32(row, i)))
    elif code == F16:
        for i in range(count):
            store_f32(row, i, round_f16(load_f32(row, i)))


@inlined
def store_row(code: int, wide: int, row: int, target: int, count: int) -> None:
    """target[:count] = float32 row[:count], rounded once; as float32 if `wide`. Changes `row`."""
    if wide != 0:
        round_row(code, row, count)
        widen_row(F32, row, target, count)
    else:
        narrow_row(code, row, target, count)


def token_rows(x: Tensor) -> Tensor:
    """`x` [T, H, D] as it is where only the tokens lie apart, else a contiguous copy."""
    token_stride, head_stride, stride = x.stride()
    packed = stride == 1 and head_stride == x.shape[2] and token_stride >= 0
    return x if packed else x.contiguous()
