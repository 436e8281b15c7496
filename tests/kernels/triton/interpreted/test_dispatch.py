"""A whole model whose ops go to the GPU's kernels, against the same model in plain torch."""

import pytest
import torch
from hf_pair import make_pair, random_ids
from paged_driver import PagedDriver

from octavo.engine.attention.metadata import AttentionMetadata, KVCacheLayout
from octavo.engine.worker.kv_cache import KVCache
from octavo.kernels import ops, reference, triton
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.rotary_args import Rotation


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_backend", lambda x: triton)
    monkeypatch.setattr(ops, "_device_backend", lambda x: triton)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_model_on_the_kernels_equals_plain_torch(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ops.reference_only():
        model = make_pair(model_type).ours
        model.program = None
        plain = PagedDriver(model)
        expected = [plain.prefill(0, random_ids(19, seed=1), chunk=12)]
        expected.append(plain.step({0: [5], 1: random_ids(3, seed=2)})[0])
    monkeypatch.setattr(ops, "_backend", lambda x: triton)
    monkeypatch.setattr(ops, "_device_backend", lambda x: triton)
    driver = PagedDriver(model)
    actual = [driver.prefill(0, random_ids(19, seed=1), chunk=12)]
    actual.append(driver.step({0: [5], 1: random_ids(3, seed=2)})[0])
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_swapped_blocks_and_scores_reach_the_kernels(on_gpu: None) -> None:
    source, target = torch.randn(4, 2, 4, 8), torch.zeros(5, 2, 4, 8)
    ops.swap_blocks(source, target, torch.tensor([3, 0]), torch.tensor([1, 4]))
    assert torch.equal(target[[1, 4]], source[[3, 0]]) and not target[[0, 2, 3]].any()
    logits = torch.randn(3, 5000)
    token_ids = torch.tensor([0, 4999, 77])
    ours = ops.score_on_device(logits, token_ids, 4)
    theirs = ops.score_tokens(logits, token_ids, 4)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs)
    assert torch.equal(ours.top_ids, theirs.top_ids) and torch.equal(ours.ranks, theirs.ranks)


@pytest.mark.parametrize("copies", [((2, 0),), ((2, 0), (1, 3))])
def test_the_engine_copies_any_number_of_blocks(
    on_gpu: None, copies: tuple[tuple[int, int], ...]
) -> None:
    cache = KVCache(KVCacheLayout(4, 1, 2, 2, torch.float32), 1, torch.device("cpu"), 4)
    (layer,) = cache.layers
    layer.key.copy_(torch.arange(20.0).view(5, 1, 2, 2))
    before = layer.key.clone()
    cache.swap_out(copies)
    cache.copy_blocks(copies)
    for source, destination in copies:
        assert torch.equal(layer.key[destination], before[source])
    layer.key.zero_()
    cache.swap_in(tuple((destination, source) for source, destination in copies))
    for source, _ in copies:
        assert torch.equal(layer.key[source], before[source])


def test_a_cache_in_e4m3_is_written_and_read_with_its_scales(on_gpu: None) -> None:
    # Numbers that e4m3 has, and no rotation: the interpreter's conversion rounds differently.
    q, k, v = (torch.randint(-8, 9, (5, count, 16)).float() for count in (2, 1, 1))
    rotation = Rotation(torch.arange(5), torch.tensor([[1.0] * 8 + [0.0] * 8] * 5))
    scales = (torch.full((1,), 0.5), torch.full((1,), 2.0))
    tensors = (torch.zeros(3, 1, 4, 16, dtype=torch.float8_e4m3fn) for _ in "kv")
    cache = PagedCache(*tensors, *scales)
    ops.rotate_and_cache(q, k, v, None, rotation, cache, torch.arange(5))
    batch = AttentionMetadata(
        torch.arange(5),
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.tensor([0, 5], dtype=torch.int32),
        max_query_len=5,
        max_seq_len=5,
    )
    actual = ops.scaled_paged_attention(q, cache, batch, 0.01)
    torch.testing.assert_close(
        actual, reference.scaled_paged_attention(q, cache, batch, 0.01, None, None)
    )
    keys = cache.key.float()[:2].reshape(8, 16)[:5] * 0.5
    assert torch.equal(keys, k[:, 0])
