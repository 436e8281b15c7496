"""The tensors of the cache."""

import numpy as np
import pytest
import torch

from octavo.engine.attention.metadata import KVCacheLayout
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.worker import kv_cache
from octavo.engine.worker.kv_cache import KVCache

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_zero_aligned_and_have_one_block_more(dtype: torch.dtype) -> None:
    cache = KVCache(KVCacheLayout(7, 2, 4, 6, dtype), 3, CPU)
    assert len(cache.layers) == 3
    for layer in cache.layers:
        for tensor in (layer.key, layer.value):
            assert tensor.shape == (8, 2, 4, 6)
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0
            assert not tensor.any()


def test_copies_reach_every_layer_and_read_before_they_write() -> None:
    cache = KVCache(KVCacheLayout(4, 1, 2, 1, torch.float32), 2, CPU)
    for layer in cache.layers:
        for tensor in (layer.key, layer.value):
            tensor.copy_(torch.arange(10.0).view(5, 1, 2, 1))
    cache.copy_blocks(((0, 1), (1, 2)))
    for layer in cache.layers:
        for tensor in (layer.key, layer.value):
            assert tensor.flatten().tolist() == [0, 1, 0, 1, 2, 3, 6, 7, 8, 9]


def test_memory_that_cannot_be_had_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(kv_cache.np, "zeros", refuse)
    with pytest.raises(ConfigurationError, match="--kv-cache-memory-bytes"):
        KVCache(KVCacheLayout(7, 2, 4, 6, torch.float32), 3, CPU)
