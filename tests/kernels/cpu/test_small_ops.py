"""Norms, rotary embedding, activations and cache writes against the plain-torch ones."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, reference

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = _random(5, 3, 77, dtype=dtype), _random(77, dtype=dtype)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = _random(60, 577), _random(61, 577)[1:], _random(577)
    arguments = (x.to(dtype), residual.to(dtype), weight.to(dtype), 1e-6)
    before = [a.clone() for a in arguments[:2]]
    actual, expected = cpu.add_rms_norm(*arguments), reference.add_rms_norm(*arguments)
    torch.testing.assert_close(actual, expected)
    # The sum goes on as the residual of all later layers: not one bit may differ.
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(before[0], arguments[0])
    assert torch.equal(before[1], arguments[1])


def test_norm_with_a_weight_of_another_precision() -> None:
    x, weight = _random(4, 8, dtype=torch.bfloat16), _random(8)
    assert torch.equal(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("rotary", [16, 6])
def test_rotary_embedding_of_slices(dtype: torch.dtype, rotary: int) -> None:
    qkv = _random(130, 8 * 16, dtype=dtype)
    q, k = qkv[:, : 5 * 16].view(130, 5, 16), qkv[:, 5 * 16 : 7 * 16].view(130, 2, 16)
    positions = torch.arange(130) * 7 % 50
    arguments = (q, k, positions, _random(50, rotary))
    torch.testing.assert_close(
        cpu.rotary_embedding(*arguments), reference.rotary_embedding(*arguments)
    )


@pytest.mark.parametrize("position", [-1, 50])
def test_position_outside_the_table_is_refused(position: int) -> None:
    q = _random(1, 2, 8)
    with pytest.raises(IndexError, match=r"outside 0 \.\.\. 49"):
        cpu.rotary_embedding(q, q, torch.tensor([position]), _random(50, 8))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_gated_activations(dtype: torch.dtype) -> None:
    gate_up = (_random(70, 2 * 133) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-300.0, 300.0, float("inf"), 0.0])
    # Two roundings: where the first one turns, the second may turn too.
    near = {"rtol": max(2 * torch.finfo(dtype).eps, 1e-5), "atol": 1e-5}
    torch.testing.assert_close(cpu.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), **near)
    for tanh in (True, False):
        expected = reference.gelu_and_mul(gate_up, tanh)
        torch.testing.assert_close(cpu.gelu_and_mul(gate_up, tanh), expected, **near)


def test_activation_keeps_nan() -> None:
    gate_up = torch.ones(1, 6)
    gate_up[0, 1] = float("nan")
    assert cpu.silu_and_mul(gate_up).isnan().tolist() == [[False, True, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cache_write_skips_negative_slots(dtype: torch.dtype) -> None:
    qkv = _random(4, 6 * 8, dtype=dtype)
    k, v = qkv[:, : 3 * 8].view(4, 3, 8), qkv[:, 3 * 8 :].view(4, 3, 8)
    slots = torch.tensor([7, -1, 0, 19])
    caches = [torch.zeros(5, 3, 4, 8, dtype=dtype) for _ in range(4)]
    cpu.write_kv_cache(k, v, *caches[:2], slots)
    reference.write_kv_cache(k, v, *caches[2:], slots)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


def test_slot_outside_the_cache_is_refused() -> None:
    cache, k = torch.zeros(5, 3, 4, 8), torch.ones(1, 3, 8)
    with pytest.raises(IndexError, match="not below 20"):
        cpu.write_kv_cache(k, k, cache, cache, torch.tensor([20]))
    assert (cache == 0).all()


def test_cache_of_another_precision() -> None:
    cache, k = torch.zeros(2, 1, 4, 8), torch.ones(1, 1, 8, dtype=torch.bfloat16)
    cpu.write_kv_cache(k, k, cache, cache, torch.tensor([3]))
    assert (cache[0, 0, 3] == 1).all()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_kernels_pass_their_own_test(dtype: torch.dtype) -> None:
    assert cpu.usable(dtype)


def test_other_types_have_no_kernels() -> None:
    assert not cpu.usable(torch.float64)
