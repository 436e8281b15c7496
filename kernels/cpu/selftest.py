"""Whether the kernels may be used here: the processor's features, then a test against torch."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu.activation import silu_and_mul
from octavo.kernels.cpu.attention import paged_attention
from octavo.kernels.cpu.compiled import is_first_start
from octavo.kernels.cpu.kv_cache import write_kv_cache
from octavo.kernels.cpu.linear import linear, pack_int8_linear, pack_linear
from octavo.kernels.cpu.norm import add_rms_norm
from octavo.kernels.cpu.numbers import CODES
from octavo.kernels.cpu.processor import FEATURES
from octavo.kernels.cpu.quantize import quantize_weight
from octavo.kernels.cpu.rotary import rotary_embedding
from octavo.kernels.cpu.sampling import argmax, draw, draw_filtered
from octavo.kernels.reference import sampling
from octavo.kernels.sampling_args import SamplingFilters

logger = logging.getLogger(__name__)

# Vectors of eight float32, fused multiply-add, conversion from float16.
_FEATURES = ("avx2", "fma", "f16c")


@cache
def usable(dtype: torch.dtype) -> bool:
    """Whether tensors of `dtype` on the CPU go to these kernels; the first call compiles them."""
    return dtype in CODES and _right(str(dtype), lambda: _checks(dtype))


@cache
def can_sample() -> bool:
    """Whether the kernels for draws may be used; the first call compiles them."""
    return _right("sampling", _sampling_checks)


@cache
def can_quantize(dtype: torch.dtype) -> bool:
    """Whether models of `dtype` may have int8 weights; the first call compiles their kernels."""
    return usable(dtype) and _right(f"int8 weights and {dtype}", lambda: _int8_checks(dtype))


@cache
def _warn(text: str) -> None:
    """The same warning once, for however many kinds of kernels it holds."""
    logger.warning(text)


def _right(subject: str, checks: Callable[[], Iterator[tuple[str, bool]]]) -> bool:
    missing = [name for name in _FEATURES if name not in FEATURES]
    if missing:
        _warn(
            f"This processor has no {', '.join(missing)}: the CPU runs the plain torch kernels, "
            "which are slower."
        )
        return False
    if is_first_start():
        logger.info("Compiling the kernels for this processor, once: it takes about half a minute")
    try:
        wrong = [name for name, right in checks() if not right]
    except Exception as error:
        # Whatever the compiler or the machine does not like, torch still works.
        reason = next(iter(str(error).splitlines()), "")
        _warn(
            f"The CPU kernels cannot run here ({type(error).__name__}: {reason}): plain torch is "
            "used, which is slower."
        )
        logger.debug("Why the CPU kernels cannot run", exc_info=True)
        return False
    if wrong:
        logger.error(
            "CPU kernels give wrong results here for %s (%s): plain torch is used, "
            "which is slower. Please report this with the processor's name.",
            subject,
            ", ".join(wrong),
        )
    return not wrong


@dataclass(frozen=True, slots=True)
class _Batch:
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int


def _checks(dtype: torch.dtype) -> Iterator[tuple[str, bool]]:
    """(name, agrees with torch) of each kernel on a small input."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight, bias = random(7, 41), random(35, 41), random(35)
    expected = (x.double() @ weight.double().T + bias.double()).to(dtype)
    yield "linear", _close(linear(x, pack_linear(weight, bias)), expected)

    # Padding rows of odd length, few and many, must not be compiled later.
    x, weight = random(120, 561), random(16, 561)
    expected = (x.double() @ weight.double().T).to(dtype)
    yield "linear of many tokens", _close(linear(x, pack_linear(weight, None)), expected)

    x, residual, scale = random(7, 40), random(7, 40), random(40)
    normed, total = add_rms_norm(x, residual, scale, 1e-5)
    expected_normed, expected_total = reference.add_rms_norm(x, residual, scale, 1e-5)
    yield "norm", _close(normed, expected_normed) and _close(total, expected_total)
    yield "activation", _close(silu_and_mul(x), reference.silu_and_mul(x))

    q, k, v = random(7, 4, 16), random(7, 2, 16), random(7, 2, 16)
    table = torch.randn(7, 16, generator=generator)
    positions = torch.arange(7)
    rotated = rotary_embedding(q, k, positions, table)
    expected_rotated = reference.rotary_embedding(q, k, positions, table)
    yield "rotary", all(map(_close, rotated, expected_rotated))

    cache = torch.full((5, 2, 4, 16), float("nan"), dtype=dtype)
    values = cache.clone()
    write_kv_cache(k, v, cache, values, torch.tensor([12, 13, 14, 15, 4, 5, 6]))
    batch = _Batch(
        torch.tensor([[3, 1]], dtype=torch.int32),
        torch.tensor([7], dtype=torch.int32),
        torch.tensor([0, 7], dtype=torch.int32),
        7,
        7,
    )
    actual = paged_attention(q, cache, values, batch, 0.25, None, None)
    wanted = reference.paged_attention(q, cache, values, batch, 0.25, None, None)
    yield "attention", _close(actual, wanted)

    # Few query rows over heads that fill panels have products of their own.
    q, k, v = random(1, 4, 64), random(5, 2, 16, 64), random(5, 2, 16, 64)
    batch = _Batch(
        torch.tensor([[3, 1, 4]], dtype=torch.int32),
        torch.tensor([35], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        1,
        35,
    )
    actual = paged_attention(q, k, v, batch, 0.25, None, None)
    wanted = reference.paged_attention(q, k, v, batch, 0.25, None, None)
    yield "attention of one token", _close(actual, wanted)


def _int8_checks(dtype: torch.dtype) -> Iterator[tuple[str, bool]]:
    """(name, agrees with torch) of products of few tokens and of many."""
    generator = torch.Generator().manual_seed(0)
    for name, tokens, inputs in (("few tokens", 7, 96), ("many tokens", 120, 576)):
        x = torch.randn(tokens, inputs, generator=generator).to(dtype)
        weight = torch.randn(35, inputs, generator=generator)
        numbers, scales = quantize_weight(weight)
        stored = (numbers.double() * scales.double()[..., None]).flatten(1)
        expected = (x.double() @ stored.T).to(dtype)
        actual = linear(x, pack_int8_linear(weight, None))
        # Activations have 16 bits, which float32 would show.
        tolerance = max(16 * torch.finfo(dtype).eps, 2e-3)
        yield name, torch.allclose(actual.float(), expected.float(), tolerance, tolerance)


def _sampling_checks() -> Iterator[tuple[str, bool]]:
    """(name, agrees with torch) of each kind of draw."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 1000, generator=generator)
    rows = torch.tensor([2, 0, 1, 2])
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.1])
    uniforms = torch.rand(4, generator=generator, dtype=torch.float64)
    filters = SamplingFilters(
        temperature,
        torch.tensor([0.0, 0.01, 0.0, 0.0], dtype=torch.float64),
        torch.tensor([0, 0, 20, 5]),
        torch.tensor([0.9, 1.0, 0.5, 1.0], dtype=torch.float64),
    )
    found = zip(argmax(logits), sampling.argmax(logits), strict=True)
    yield "argmax", all(torch.equal(actual, expected) for actual, expected in found)
    expected = sampling.draw(logits, rows, temperature, uniforms)
    yield "draw", torch.equal(draw(logits, rows, temperature, uniforms), expected)
    expected = sampling.draw_filtered(logits, rows, filters, uniforms)
    yield "filtered draw", torch.equal(draw_filtered(logits, rows, filters, uniforms), expected)


def _close(actual: Tensor, expected: Tensor) -> bool:
    tolerance = max(16 * torch.finfo(expected.dtype).eps, 1e-4)
    return torch.allclose(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)
