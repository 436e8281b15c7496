"""The tensors of the cache."""

import mmap

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


def test_kernels_may_read_a_vector_past_the_last_row() -> None:
    cache = KVCache(KVCacheLayout(7, 1, 4, 8, torch.float32), 1, CPU)
    storage = cache.layers[0].value.untyped_storage()
    end = cache.layers[0].value.data_ptr() + cache.layers[0].value.nbytes
    # What is read of 8 components of float32 where vectors of them are taken by 32.
    assert storage.data_ptr() + storage.nbytes() >= end + 4 * (32 - 8)


def test_copies_reach_every_layer_and_read_before_they_write() -> None:
    cache = KVCache(KVCacheLayout(4, 1, 2, 1, torch.float32), 2, CPU)
    for layer in cache.layers:
        for tensor in (layer.key, layer.value):
            tensor.copy_(torch.arange(10.0).view(5, 1, 2, 1))
    cache.copy_blocks(((0, 1), (1, 2)))
    for layer in cache.layers:
        for tensor in (layer.key, layer.value):
            assert tensor.flatten().tolist() == [0, 1, 0, 1, 2, 3, 6, 7, 8, 9]


def test_a_cache_in_e4m3_takes_a_byte_a_number_and_moves_bits() -> None:
    layout = KVCacheLayout(3, 1, 2, 2, torch.float8_e4m3fn)
    assert layout.bytes_per_block == 2 * 1 * 2 * 2
    scale = torch.ones(1)
    cache = KVCache(layout, 1, CPU, num_host_blocks=2, scales=[(scale, scale * 2)])
    (layer,) = cache.layers
    assert (layer.key_scale, layer.value_scale) == (scale, scale * 2)
    bits = [tensor.view(torch.uint8) for tensor in (layer.key, layer.value)]
    for tensor in bits:
        # A NaN among them.
        tensor.copy_(torch.arange(112, 128, dtype=torch.uint8).view(4, 1, 2, 2))
    cache.swap_out(((1, 0),))
    cache.copy_blocks(((2, 1), (0, 2)))
    cache.swap_in(((0, 0),))
    for tensor in bits:
        assert tensor.flatten(1)[:, 0].tolist() == [116, 120, 112, 124]


def test_memory_that_cannot_be_had_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(kv_cache.np, "zeros", refuse)
    with pytest.raises(ConfigurationError, match="--kv-cache-memory-bytes"):
        KVCache(KVCacheLayout(7, 2, 4, 6, torch.float32), 3, CPU)


def test_blocks_go_to_host_memory_and_back_in_every_layer() -> None:
    cache = KVCache(KVCacheLayout(4, 1, 2, 1, torch.float32), 2, CPU, num_host_blocks=3)
    for number, layer in enumerate(cache.layers):
        layer.key.copy_(torch.arange(10.0).view(5, 1, 2, 1) + 100 * number)
        layer.value.copy_(layer.key + 50)
    cache.swap_out(((1, 0), (3, 2)))
    cache.layers[0].key[1] = cache.layers[1].value[3] = -1
    cache.swap_in(((0, 0), (2, 3)))
    first, second = cache.layers
    assert first.key.flatten().tolist()[:4] == [2, 3, -1, -1]
    assert second.value.flatten().tolist()[6:8] == [156, 157]


def test_host_memory_that_cannot_be_had_names_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(KVCache, "_make_host_layers", refuse)
    with pytest.raises(ConfigurationError, match="--swap-space or --kv-offload"):
        KVCache(KVCacheLayout(1, 1, 2, 1, torch.float32), 1, CPU, num_host_blocks=2)


class Runtime:
    """Stands for CUDA's; `refuses` is the error that it answers with."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned[address] = size
        return self.refuses

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]


def test_pinned_blocks_take_what_they_need_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    # 33 blocks of 5 bytes with the one more: 165, and 192 with the distance to the next tensor.
    layout = KVCacheLayout(1, 1, 1, 5, torch.float8_e4m3fn)
    cache = KVCache(layout, 3, torch.device("meta"), num_host_blocks=32)
    ((address, size),) = runtime.pinned.items()
    assert (address % mmap.PAGESIZE, size) == (0, 6 * 192)
    tensors = [tensor for layer in cache._host_layers for tensor in (layer.key, layer.value)]
    assert [tensor.data_ptr() for tensor in tensors] == [address + 192 * n for n in range(6)]
    assert all(tensor.shape == (33, 1, 1, 5) for tensor in tensors)
    assert not any(tensor.view(torch.uint8).any() for tensor in tensors)
    del cache
    assert not runtime.pinned


def test_host_memory_that_cannot_be_pinned_names_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(refuses=2))
    layout = KVCacheLayout(1, 1, 1, 5, torch.float32)
    with pytest.raises(ConfigurationError, match="--swap-space or --kv-offload"):
        KVCache(layout, 1, torch.device("meta"), num_host_blocks=1)
