"""What the host side of every kernel needs: argument checks and facts about the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FP8 = torch.float8_e4m3fn
MAX_HEAD_SIZE = 256


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What tile sizes and checks depend on.

    `shared_memory` is the most that one program may use, in bytes; `reads_fp8` whether the
    device converts e4m3 in hardware.
    """

    name: str
    shared_memory: int
    reads_fp8: bool


_NO_DEVICE = DeviceFacts("no device", 227 * 1024, reads_fp8=True)
_assumed: ContextVar[DeviceFacts] = ContextVar("assumed", default=_NO_DEVICE)


@contextmanager
def assume_device(facts: DeviceFacts) -> Iterator[None]:
    """Within it, tensors that are on no GPU are taken to be on one like this."""
    token = _assumed.set(facts)
    try:
        yield
    finally:
        _assumed.reset(token)


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of the GPU that `device` is, or of the assumed one."""
    return _read_facts(device) if device.type == "cuda" else _assumed.get()


@cache
def _read_facts(device: torch.device) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        # CDNA: 64 KiB of local memory, and e4m3 from gfx942 on.
        reads_fp8 = (properties.major, properties.minor) >= (9, 4)
        return DeviceFacts(properties.name, 64 * 1024, reads_fp8)
    return DeviceFacts(
        properties.name,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # not in the stubs
        (properties.major, properties.minor) >= (8, 9),
    )


def reads_fp8(device: torch.device) -> bool:
    """Whether the GPU that `device` is converts e4m3 in hardware."""
    return device_facts(device).reads_fp8


# Triton has both, but called on the host they take longer than a launch.
def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def check(condition: bool, message: str, *facts: object) -> None:
    """Raises ValueError unless the condition holds; `facts` fill the braces of `message`."""
    if not condition:
        # Not before: shapes as text take longer than all the rest of a launch.
        raise ValueError(message.format(*facts))


def check_pair(k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless keys and values have one shape and one dtype."""
    alike = k.shape == v.shape and k.dtype == v.dtype
    check(alike, "k {} {}, v {} {}", k.shape, k.dtype, v.shape, v.dtype)


def check_same_device(*tensors: Tensor) -> None:
    """Raises ValueError unless all tensors are on one device."""
    devices = {tensor.device for tensor in tensors}
    check(len(devices) == 1, "tensors on several devices: {}", devices)


def check_rows_dense(name: str, x: Tensor) -> None:
    """Raises ValueError unless the last dimension of `x` is contiguous."""
    # torch gives a dimension of one entry any stride.
    dense = x.stride(-1) == 1 or x.shape[-1] <= 1
    check(dense, "{}: the last dimension must be contiguous, not {}", name, x.stride())


def check_cache(key_cache: Tensor, value_cache: Tensor) -> None:
    """Raises ValueError unless both are [blocks, Hkv, block_size, D] with the same strides."""
    check(key_cache.dim() == 4, "the key cache must have 4 dimensions, not {}", key_cache.dim())
    same = key_cache.shape == value_cache.shape and key_cache.stride() == value_cache.stride()
    check(
        same and key_cache.dtype == value_cache.dtype,
        "key and value cache differ: {} {} {} and {} {} {}",
        key_cache.shape,
        key_cache.stride(),
        key_cache.dtype,
        value_cache.shape,
        value_cache.stride(),
        value_cache.dtype,
    )
    check_rows_dense("cache", key_cache)
    check_same_device(key_cache, value_cache)


def check_cache_dtype(cache: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError unless the cache has `dtype`, or fp8 on a device that reads it."""
    check(cache.dtype in (dtype, FP8), "a cache of {} under queries of {}", cache.dtype, dtype)
    facts = device_facts(cache.device)
    check(
        cache.dtype != FP8 or facts.reads_fp8,
        "{} has no e4m3 conversion (it needs sm_89 or later); use a {} cache",
        facts.name,
        dtype,
    )
