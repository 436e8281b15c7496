"""Weights that do not fit into memory are refused before any of them is read."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from octavo.config.load import LoadConfig
from octavo.config.model import ModelConfig, RopeConfig
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.loader import resolve_checkpoint, safetensors
from octavo.engine.loader.filling import WeightRoom, load_model
from octavo.engine.models.registry import build_model
from octavo.kernels import ops

CPU = torch.device("cpu")
TABLE = 96 * 64
LINEAR = 2 * ((64 + 2 * 32) * 64 + 64 * 64 + 3 * 64 * 128)
NORMS = 5 * 64


def small_config(*, tied: bool) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        rope=RopeConfig(rotary_dim=32),
        windows=(None, None),
        max_model_len=32,
        dtype="float32",
    )


def weight_bytes(*, tied: bool, int8: bool = False) -> int:
    return build_model(small_config(tied=tied), torch.bfloat16, CPU).weight_bytes(int8)


def test_a_head_of_its_own_counts_as_large_as_the_embeddings() -> None:
    assert weight_bytes(tied=False) == 2 * (2 * TABLE + LINEAR + NORMS)


def test_int8_leaves_embeddings_and_norms_as_they_are() -> None:
    # One byte, and a scale of two for each 32.
    expected = 2 * (TABLE + NORMS) + (LINEAR + TABLE) * 34 // 32
    assert weight_bytes(tied=False, int8=True) == expected
    assert weight_bytes(tied=True, int8=True) == expected


def test_a_tied_head_takes_memory_only_where_it_is_packed_anew() -> None:
    with ops.reference_only():
        assert weight_bytes(tied=True) == 2 * (TABLE + LINEAR + NORMS)
    if ops.can_quantize(torch.bfloat16, CPU):
        assert weight_bytes(tied=True) == weight_bytes(tied=False)


def test_what_does_not_fit_is_refused_unread(random_llama_dir: Path) -> None:
    checkpoint = resolve_checkpoint(LoadConfig(model=str(random_llama_dir)))
    needed = build_model(checkpoint.model_config, torch.float32, CPU).weight_bytes(False)
    assert load_model(checkpoint, torch.float32, CPU, WeightRoom(needed)).dtype == torch.float32

    def read() -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the weights were read")

    unread = replace(checkpoint, weights=read)
    message = f"take {needed} bytes of memory in float32, and {needed - 1} are free; .*"
    with pytest.raises(ConfigurationError, match=f"{message}--quantization int8 or --dtype bfl"):
        load_model(unread, torch.float32, CPU, WeightRoom(needed - 1))


def test_only_what_would_help_is_advised(random_llama_dir: Path) -> None:
    checkpoint = resolve_checkpoint(LoadConfig(model=str(random_llama_dir)))
    with pytest.raises(ConfigurationError, match="use a smaller model, or free memory"):
        load_model(checkpoint, torch.float32, CPU, WeightRoom(1000))


def test_dummy_weights_have_to_fit_too(random_llama_dir: Path) -> None:
    checkpoint = resolve_checkpoint(LoadConfig(model=str(random_llama_dir), load_format="dummy"))
    with pytest.raises(ConfigurationError, match="use a smaller model, or free memory") as caught:
        load_model(checkpoint, torch.bfloat16, CPU, WeightRoom(1000, int8=True))
    assert re.search("bytes of memory in int8, and 1000 are free", str(caught.value))


def test_a_file_that_cannot_be_mapped_is_not_called_damaged(
    random_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SafetensorError("Error while opening: Cannot allocate memory (os error 12)")

    checkpoint = resolve_checkpoint(LoadConfig(model=str(random_llama_dir)))
    monkeypatch.setattr(safetensors, "safe_open", refuse)
    with pytest.raises(MemoryError, match="os error 12"):
        load_model(checkpoint, torch.float32, CPU)
