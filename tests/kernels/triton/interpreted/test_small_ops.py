"""Norms, activations, rotation, cache writes and linear layers against their twins."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference, triton
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.reference.projection import PlainWeight
from octavo.kernels.rotary_args import HeadNorm, Rotation
from octavo.kernels.triton import projection
from octavo.kernels.triton.projection import SKINNY_ROWS, SLICE_ROWS, skinny_linear

# Kernel and twin round the same fp32 formulas in another order.
close = torch.testing.assert_close


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 64), (5, 96), (3, 7, 80), (2, 1030)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    close(triton.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_a_slice() -> None:
    x, weight = random(5, 300)[:, 100:196], random(96, seed=1)
    close(triton.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_add_rms_norm() -> None:
    x, residual, weight = random(5, 96), random(5, 96, seed=1), random(96, seed=2)
    for ours, theirs in zip(
        triton.add_rms_norm(x, residual, weight, 1e-6),
        reference.add_rms_norm(x, residual, weight, 1e-6),
        strict=True,
    ):
        close(ours, theirs)


@pytest.mark.parametrize(
    "op",
    [
        lambda module, x: module.silu_and_mul(x),
        lambda module, x: module.gelu_and_mul(x, tanh=True),
        lambda module, x: module.gelu_and_mul(x, tanh=False),
    ],
    ids=["silu", "gelu tanh", "gelu"],
)
def test_gated_activation(op: Callable[[object, Tensor], Tensor]) -> None:
    gate_up = 4 * random(3, 2 * 1030)
    close(op(triton, gate_up), op(reference, gate_up))


def table(positions: int, rotary: int) -> Tensor:
    angles = torch.arange(positions)[:, None] / 10 ** torch.linspace(0, 3, rotary // 2)
    return torch.cat((angles.cos(), angles.sin()), -1)


@pytest.mark.parametrize(("size", "rotary"), [(64, 64), (80, 32), (96, 96)])
def test_rotary_embedding(size: int, rotary: int) -> None:
    q, k = random(3, 5, size), random(3, 1, size, seed=1)
    positions = torch.tensor([7, 0, 30])
    for ours, theirs in zip(
        triton.rotary_embedding(q, k, positions, table(31, rotary)),
        reference.rotary_embedding(q, k, positions, table(31, rotary)),
        strict=True,
    ):
        close(ours, theirs)


def both_caches(heads: int, size: int) -> tuple[PagedCache, PagedCache]:
    ours, theirs = (
        PagedCache(torch.zeros(6, heads, 4, size), torch.zeros(6, heads, 4, size)) for _ in range(2)
    )
    return ours, theirs


@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_cache(normed: bool) -> None:
    size, rotary = 80, 40
    # As the model hands them on: slices of one product.
    qkv = random(4, 6 + 5 + 5, size)
    q, k, v = qkv.split((6, 5, 5), dim=1)
    norm = HeadNorm(random(size, seed=1), random(size, seed=2), 1e-6) if normed else None
    rotation = Rotation(torch.tensor([3, 4, 5, 0]), table(6, rotary))
    slots = torch.tensor([9, 23, -1, 0])
    ours, theirs = both_caches(5, size)
    close(
        triton.rotate_and_cache(q, k, v, norm, rotation, ours, slots),
        reference.rotate_and_cache(q, k, v, norm, rotation, theirs, slots),
    )
    close(ours.key, theirs.key)
    close(ours.value, theirs.value)


def test_e4m3_cache_holds_what_the_scales_leave() -> None:
    # Without rotation and with numbers that e4m3 has: where rounding up reaches a power of two,
    # Triton's interpreter loses the carry. The last number is beyond the range.
    numbers = torch.tensor([0.0, -1.75, 448.0, 0.001953125, 13.0, -1000.0])
    scales = torch.tensor([0.5, 4.0])
    k = numbers.repeat(2, 1)[None] * scales[:, None]
    cache = PagedCache(
        *(torch.zeros(2, 2, 4, 6, dtype=torch.float8_e4m3fn) for _ in range(2)), scales, scales
    )
    rotation = Rotation(torch.tensor([0]), table(1, 6))
    triton.rotate_and_cache(k, k, -k, None, rotation, cache, torch.tensor([6]))
    expected = numbers.clamp(min=-448.0).expand(2, 6)
    assert torch.equal(cache.key[1, :, 2].float(), expected)
    assert torch.equal(cache.value[1, :, 2].float(), -expected)


def test_write_kv_cache_skips_negative_slots() -> None:
    k, v = random(3, 5, 96), random(3, 5, 96, seed=1)
    slots = torch.tensor([11, -1, 20])
    ours, theirs = both_caches(5, 96)
    triton.write_kv_cache(k, v, ours.key, ours.value, slots)
    reference.write_kv_cache(k, v, theirs.key, theirs.value, slots)
    assert torch.equal(ours.key, theirs.key)
    assert torch.equal(ours.value, theirs.value)


def test_copy_blocks_reads_before_it_writes() -> None:
    keys, values = random(5, 3, 4, 8), random(5, 3, 4, 8, seed=1)
    others = keys.clone(), values.clone()
    src, dst = torch.tensor([0, 1, 4]), torch.tensor([1, 0, 2])
    triton.copy_blocks(keys, values, src, dst)
    reference.copy_blocks(*others, src, dst)
    assert torch.equal(keys, others[0])
    assert torch.equal(values, others[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_swap_blocks_moves_bits(dtype: torch.dtype) -> None:
    source = random(4, 3, 50).to(dtype)
    source[2, 0, 0] = torch.nan
    ours, theirs = torch.zeros(6, 3, 50, dtype=dtype), torch.zeros(6, 3, 50, dtype=dtype)
    arguments = torch.tensor([2, 0]), torch.tensor([5, 1])
    triton.swap_blocks(source, ours, *arguments)
    reference.swap_blocks(source, theirs, *arguments)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 40, 512), (3, 33, 300), (16, 16, 100)])
@pytest.mark.parametrize("bias", [False, True])
def test_skinny_linear(rows: int, columns: int, depth: int, bias: bool) -> None:
    x, weight = random(rows, depth), random(columns, depth, seed=1)
    packed = PlainWeight(weight, random(columns, seed=2) if bias else None)
    # Sums of hundreds of products of size 1.
    close(skinny_linear(x, packed), reference.linear(x, packed), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, SKINNY_ROWS, SKINNY_ROWS + 1])
def test_linear_takes_any_number_of_rows(rows: int) -> None:
    x, weight = random(rows, 64).half(), random(40, 64, seed=1).half()
    packed = triton.pack_linear(weight, None)
    exact = x.double() @ weight.double().T
    # Half precision keeps 11 bits.
    close(triton.linear(x, packed).double(), exact, atol=1e-3, rtol=2**-10)


@pytest.mark.parametrize("rows", [0, 1, SLICE_ROWS, SLICE_ROWS + 3])
@pytest.mark.parametrize("bias", [False, True])
def test_products_in_slices_have_one_shape(
    rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = random(rows, 48), random(40, 48, seed=1)
    packed = PlainWeight(weight, random(40, seed=2) if bias else None)
    expected = reference.linear(x, packed)
    shapes = []
    original = torch.nn.functional.linear

    def product(part: Tensor, *args: Tensor | None) -> Tensor:
        shapes.append(part.shape)
        return original(part, *args)

    monkeypatch.setattr(projection.F, "linear", product)
    out = triton.linear_in_slices(x, packed)
    close(out, expected, atol=1e-4, rtol=1e-5)
    assert shapes == [(SLICE_ROWS, 48)] * -(-rows // SLICE_ROWS)


def test_wrong_arguments_are_refused() -> None:
    x = random(4, 96)
    with pytest.raises(ValueError, match="a weight"):
        triton.rms_norm(x, random(64), 1e-5)
    with pytest.raises(ValueError, match="slots"):
        triton.write_kv_cache(
            random(2, 5, 8),
            random(2, 5, 8),
            torch.zeros(1, 5, 4, 8),
            torch.zeros(1, 5, 4, 8),
            torch.tensor([0]),
        )
    with pytest.raises(ValueError, match=r"activation of torch\.int64"):
        triton.silu_and_mul(torch.zeros(1, 8, dtype=torch.int64))
