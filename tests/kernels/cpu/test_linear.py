"""Packed linear layers against float64 products."""

import pytest
import torch

from octavo.kernels.cpu.linear import linear, pack_linear

_SHAPES = [(1, 64, 48), (2, 63, 17), (3, 65, 1), (5, 2, 16), (7, 576, 100), (31, 130, 33)]
_TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


def _check(tokens: int, inputs: int, outputs: int, dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(tokens * inputs + outputs)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()

    actual = linear(x, pack_linear(weight, bias))

    assert actual.dtype == dtype
    rtol = _TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=2**-19)


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_rounds_the_exact_product_once(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    _check(*shape, dtype, with_bias=False)


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
def test_adds_the_bias_before_rounding(dtype: torch.dtype) -> None:
    _check(6, 40, 50, dtype, with_bias=True)


def test_many_tokens_are_cut_into_blocks() -> None:
    _check(210, 1100, 50, torch.bfloat16, with_bias=True)


def test_no_tokens() -> None:
    packed = pack_linear(torch.ones(5, 4), None)
    assert linear(torch.empty(0, 4), packed).shape == (0, 5)


def test_reads_rows_that_lie_apart() -> None:
    packed = pack_linear(torch.eye(4), None)
    wide = torch.arange(24.0).view(3, 8)
    torch.testing.assert_close(linear(wide[:, 2:6], packed), wide[:, 2:6])


def test_a_row_of_nan_stays_in_its_row() -> None:
    x = torch.ones(4, 33, dtype=torch.bfloat16)
    x[2] = float("nan")
    out = linear(x, pack_linear(torch.ones(20, 33, dtype=torch.bfloat16), None))
    assert out[2].isnan().all()
    assert (out[[0, 1, 3]] == 33).all()


def test_refuses_the_wrong_number_of_inputs() -> None:
    with pytest.raises(ValueError, match="3 inputs, the weight has 4"):
        linear(torch.ones(2, 3), pack_linear(torch.ones(5, 4), None))
