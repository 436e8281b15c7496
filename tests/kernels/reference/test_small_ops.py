"""Norms, rotation, activations, linear layers and cache writes against plain formulas."""

import cmath
import math

import pytest
import torch
from torch import Tensor

from octavo.kernels import ops, reference
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.rotary_args import Rotation


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = randn(3, 5, 8), randn(8)
    wide = x.double()
    root = (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(
        reference.rms_norm(x, weight, 1e-3).double(), wide / root * weight, atol=1e-6, rtol=1e-5
    )


def test_rms_norm_rounds_before_the_weight() -> None:
    x, weight = randn(7, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    wide = x.float()
    quotient = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    assert torch.equal(reference.rms_norm(x, weight, 1e-6), quotient * weight)


def test_add_rms_norm_rounds_the_sum_once() -> None:
    x, residual = randn(4, 16, dtype=torch.bfloat16), randn(4, 17, dtype=torch.bfloat16)[:, 1:]
    weight = randn(16, dtype=torch.bfloat16)
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, (x.double() + residual.double()).bfloat16())
    assert torch.equal(normed, reference.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("rotary_dim", [6, 4])
def test_rotary_turns_pairs_of_halves(rotary_dim: int) -> None:
    q, k, half = randn(3, 2, 6), randn(3, 1, 6), rotary_dim // 2
    angles = torch.tensor(
        [[0.1 * (row + 1) * (pair + 1) for pair in range(half)] for row in range(9)]
    )
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([8, 0, 3])
    for x, out in zip((q, k), reference.rotary_embedding(q, k, positions, cos_sin), strict=True):
        for token, position in enumerate(positions.tolist()):
            for head in range(x.shape[1]):
                before, after = x[token, head].tolist(), out[token, head].tolist()
                for pair in range(half):
                    number = complex(before[pair], before[pair + half])
                    number *= cmath.exp(1j * angles[position, pair].item())
                    assert math.isclose(after[pair], number.real, abs_tol=1e-6)
                    assert math.isclose(after[pair + half], number.imag, abs_tol=1e-6)
                assert after[rotary_dim:] == before[rotary_dim:]


def test_activations_multiply_gate_by_up() -> None:
    gate_up = randn(3, 10)
    gate, up = gate_up[:, :5].double(), gate_up[:, 5:].double()
    silu = gate / (1 + torch.exp(-gate)) * up
    gelu = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    gelu_tanh = 0.5 * gate * (1 + torch.tanh(inner)) * up
    for out, exact in (
        (reference.silu_and_mul(gate_up), silu),
        (reference.gelu_and_mul(gate_up, False), gelu),
        (reference.gelu_and_mul(gate_up, True), gelu_tanh),
    ):
        torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 17])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_keeps_sums_in_fp32(
    dtype: torch.dtype, rows: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slices of three output features: 10 of them leave a last slice of one.
    monkeypatch.setattr("octavo.kernels.reference.projection._SLICE_ELEMENTS", 3 * 40)
    x, weight = randn(rows, 40, dtype=dtype), randn(10, 40, dtype=dtype)
    bias = randn(10, dtype=dtype) if with_bias else None
    exact = x.double() @ weight.double().t()
    if bias is not None:
        exact += bias.double()
    out = reference.linear(x, reference.pack_linear(weight, bias))
    assert out.dtype == dtype
    # One rounding at the end, half a unit in the last place; products round in fp32.
    torch.testing.assert_close(
        out.double(), exact, atol=2e-5, rtol=torch.finfo(dtype).eps if rows > 2 else 1e-2
    )


def test_packed_weight_tells_its_shape_and_dtype() -> None:
    packed = ops.pack_linear(randn(3, 5, dtype=torch.bfloat16))
    assert (packed.shape, packed.dtype) == ((3, 5), torch.bfloat16)


def test_reference_only_ends_with_its_block() -> None:
    weight = randn(32, 32)
    usual = ops.pack_linear(weight).kernels
    with ops.reference_only():
        assert ops.pack_linear(weight).kernels is reference
    assert ops.pack_linear(weight).kernels is usual


def test_write_kv_cache_skips_negative_slots() -> None:
    k, v = randn(4, 2, 3), randn(4, 2, 4)[..., :3]
    key_cache, value_cache = torch.zeros(5, 2, 4, 3), torch.zeros(5, 2, 4, 3)
    reference.write_kv_cache(k, v, key_cache, value_cache, torch.tensor([18, -1, 3, 4]))
    for cache, source in ((key_cache, k), (value_cache, v)):
        wanted = torch.zeros(5, 2, 4, 3)
        wanted[4, :, 2], wanted[0, :, 3], wanted[1, :, 0] = source[0], source[2], source[3]
        assert torch.equal(cache, wanted)


def test_copy_blocks_reads_before_it_writes() -> None:
    key_cache, value_cache = randn(4, 1, 2, 3), randn(4, 1, 2, 5)[..., :3].contiguous()
    before = key_cache.clone(), value_cache.clone()
    reference.copy_blocks(key_cache, value_cache, torch.tensor([0, 1]), torch.tensor([1, 3]))
    for cache, old in zip((key_cache, value_cache), before, strict=True):
        assert torch.equal(cache, old[[0, 0, 2, 1]])


def test_an_e4m3_cache_holds_the_nearest_number_times_the_scale() -> None:
    patterns = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = patterns[patterns.isfinite()].double()
    k, v = 9 * randn(5, 2, 4), 9 * randn(5, 2, 4).flip(0)
    v[3, 1, 2] = 5000.0  # beyond 448 * 4
    scales = torch.tensor([0.25, 4.0])
    tensors = (torch.zeros(3, 2, 2, 4, dtype=torch.float8_e4m3fn) for _ in "kv")
    cache = PagedCache(*tensors, scales, scales)
    rotation = Rotation(torch.zeros(5, dtype=torch.int64), torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
    slots = torch.tensor([5, 0, -1, 3, 2])
    ops.rotate_and_cache(k, k, v, None, rotation, cache, slots)
    for tensor, given in ((cache.key, k), (cache.value, v)):
        wanted = given.double() / scales.double()[:, None]
        nearest = numbers[(wanted[..., None] - numbers).abs().argmin(-1)]
        stored = tensor.double().transpose(1, 2).flatten(0, 1)
        kept = slots >= 0
        assert torch.equal(stored[slots[kept]], nearest[kept])
        assert not stored[[1, 4]].any()


@pytest.mark.parametrize("bias", [False, True])
def test_bounds_of_outputs_are_reached_and_not_passed(bias: bool) -> None:
    weight, factors = randn(5, 12), randn(12)
    shift = randn(5) if bias else None
    with ops.reference_only():
        packed = ops.pack_linear(weight, shift)
    bounds = ops.output_bounds(packed, factors)
    worst = (weight * factors).double()
    worst = worst / worst.norm(dim=1, keepdim=True) * 12**0.5
    sign = 1.0 if shift is None else torch.sign(shift.double())[:, None]
    outputs = torch.nn.functional.linear(
        sign * worst * factors, weight.double(), None if shift is None else shift.double()
    )
    torch.testing.assert_close(outputs.diagonal().abs(), bounds.double(), atol=0, rtol=1e-6)
    assert (outputs.abs() <= bounds * (1 + 1e-6)).all()


def test_weights_packed_for_the_cpu_have_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_backend", lambda x: ops.cpu)
    monkeypatch.setattr(ops.cpu, "pack_linear", lambda weight, bias: "tiles")
    with pytest.raises(ValueError, match="packed for the CPU"):
        ops.output_bounds(ops.pack_linear(randn(2, 3)), randn(3))


def test_fixed_shapes_give_a_row_the_same_bits_in_any_company() -> None:
    x, weight = randn(9, 64), randn(40, 64)
    with ops.reference_only(), ops.fixed_shapes():
        packed = ops.pack_linear(weight)
    together = ops.linear(x, packed)
    for row in range(9):
        assert torch.equal(ops.linear(x[row : row + 1], packed)[0], together[row])
    assert ops.linear(x[:0], packed).shape == (0, 40)
    torch.testing.assert_close(together, x @ weight.T, atol=1e-5, rtol=1e-5)
