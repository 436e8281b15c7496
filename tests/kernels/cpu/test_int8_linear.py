"""Linear layers with int8 weights against float64 products of what the weights stand for."""

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.cpu.linear import linear, pack_int8_linear

_SHAPES = [(1, 64, 48), (2, 63, 17), (3, 65, 1), (5, 2, 16), (7, 576, 100), (31, 130, 33)]
# Of results: their own rounding, and activations of 16 bits.
_TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-13}


def stored(weight: Tensor) -> Tensor:
    """The float64 weights that int8 with a bfloat16 scale for 32 inputs can express."""
    rows, inputs = weight.shape
    out = weight.double().clone()
    for first in range(0, inputs, 32):
        part = out[:, first : first + 32]
        scale = (weight[:, first : first + 32].float().abs().amax(1) / 127).bfloat16().double()
        scale = torch.where(scale == 0, 1.0, scale)[:, None]
        part.copy_((part / scale).round().clamp(-127, 127) * scale)
    assert out.shape == (rows, inputs)
    return out


def _operands(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens * inputs + outputs)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    return x, (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_is_the_product_with_the_stored_weights(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, weight = _operands(*shape, dtype)
    bias = torch.linspace(-1, 1, shape[2]).to(dtype)

    actual = linear(x, pack_int8_linear(weight, bias))

    assert actual.dtype == dtype
    expected = x.double() @ stored(weight).T + bias.double()
    rtol = _TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=2**-13)


def test_many_tokens_are_cut_into_blocks() -> None:
    x, weight = _operands(210, 1100, 50, torch.float32)
    actual = linear(x, pack_int8_linear(weight, None))
    torch.testing.assert_close(actual.double(), x.double() @ stored(weight).T, rtol=0, atol=2**-12)


def test_groups_have_scales_of_their_own() -> None:
    x = torch.ones(1, 64)
    weight = torch.cat([torch.full((3, 32), 1e4), torch.full((3, 32), 1e-4)], 1)
    actual = linear(x * torch.tensor([0.0] * 32 + [1.0] * 32), pack_int8_linear(weight, None))
    torch.testing.assert_close(actual, torch.full((1, 3), 32e-4), rtol=2**-8, atol=0)


def test_an_outlier_leaves_the_other_groups_of_its_row_alone() -> None:
    x, weight = _operands(1, 96, 20, torch.float32)
    weight[:, 32:64] = 0
    packed = pack_int8_linear(weight, None)
    without = linear(x, packed)
    x[0, 40] = 1e30
    assert torch.equal(linear(x, packed), without)


def test_a_row_that_is_not_finite_stays_in_its_row() -> None:
    x = torch.ones(4, 33, dtype=torch.bfloat16)
    x[1, 32], x[2, 5] = float("inf"), float("nan")
    out = linear(x, pack_int8_linear(torch.ones(20, 33, dtype=torch.bfloat16), None))
    assert out[[1, 2]].isnan().all()
    assert (out[[0, 3]] == 33).all()


def test_zeros_and_the_smallest_numbers_give_zero() -> None:
    packed = pack_int8_linear(torch.zeros(3, 40), None)
    assert (linear(torch.ones(2, 40), packed) == 0).all()
    assert (
        linear(torch.full((2, 40), 1e-40), pack_int8_linear(torch.ones(3, 40), None)) == 0
    ).all()


def test_no_tokens() -> None:
    packed = pack_int8_linear(torch.ones(5, 4), None)
    assert linear(torch.empty(0, 4), packed).shape == (0, 5)


def test_weights_lose_no_more_than_in_q8_0() -> None:
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    # Inputs that are one at a time 1 read the weights back.
    kept = linear(torch.eye(1024), pack_int8_linear(weight, None)).T
    kind = gguf.GGMLQuantizationType.Q8_0
    q8_0 = torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind))
    assert (kept - weight).norm() < 1.01 * (q8_0 - weight).norm()


def test_packing_elsewhere_is_refused() -> None:
    with ops.int8_weights(), ops.reference_only(), pytest.raises(ValueError, match="no int8"):
        ops.pack_linear(torch.ones(5, 4))
