"""GGUF files, converted once into a directory in Hugging Face format."""

import hashlib
import json
import logging
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor

from octavo.config.env import cache_root
from octavo.engine.core.errors import CheckpointError
from octavo.engine.loader.files import check_gguf, make_temporary_dir
from octavo.engine.loader.gguf_config import config_from_metadata, generation_from_metadata
from octavo.engine.loader.gguf_tokenizer import save_tokenizer
from octavo.engine.loader.safetensors import INDEX_NAME

_logger = logging.getLogger(__name__)

_FORMAT = "gguf-1"
"""Part of the cache's folder name; a change of what is written below needs a new one."""
_SHARD_BYTES = 2 * 1024**3
_PARSE_ERRORS = (OSError, ValueError, LookupError, OverflowError, struct.error, MemoryError)
"""What reading a damaged file may raise in the gguf package."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEADS_OF = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_DERIVED = frozenset({"rope_freqs.weight"})
"""Tensors that the configuration stands for."""


def convert_gguf(path: Path) -> Path:
    """Return a directory in Hugging Face format with the file's content, weights in bfloat16.

    It lies in the user's cache, keyed by the file's content, so that only the first call converts.
    Where the cache cannot be written it is a temporary directory that ends with the process.
    Raises CheckpointError naming the file when it is damaged or of a kind that is not supported.
    """
    check_gguf(path)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    cached = Path(cache_root()) / "octavo" / f"{_FORMAT}-{digest[:32]}"
    if cached.is_dir():
        return cached
    _logger.info("Converting %s; this is done once", path.name)
    work = _make_work_dir(cached.parent)
    try:
        _convert(path, work)
        return _publish(work, cached)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _make_work_dir(parent: Path) -> Path:
    try:
        if not parent.is_absolute():  # without a home directory "~" stays as it is
            raise FileNotFoundError(parent)
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".converting-", dir=parent))
    except OSError as error:
        _logger.warning(
            "The cache %s cannot be written (%s); the model is converted again at each start",
            parent,
            error.strerror or type(error).__name__,
        )
        return make_temporary_dir()


def _publish(work: Path, cached: Path) -> Path:
    if work.parent != cached.parent:
        return work
    try:
        work.rename(cached)
    except OSError:
        if not cached.is_dir():
            raise
        shutil.rmtree(work, ignore_errors=True)  # another process was faster
    return cached


class _Reader(GGUFReader):  # type: ignore[misc]  # untyped library
    """Reads through a plain view of the mapped file, each slice of which costs far less."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = mapped.view(np.ndarray)


def _convert(path: Path, directory: Path) -> None:
    try:
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except _PARSE_ERRORS as error:
        raise CheckpointError(
            f"{path}: not a sound GGUF file, perhaps cut off; download it again"
        ) from error
    try:
        config = config_from_metadata(metadata, {tensor.name: tensor for tensor in reader.tensors})
        _write_json(directory / "config.json", config)
        _write_json(directory / "generation_config.json", generation_from_metadata(metadata))
        save_tokenizer(metadata, directory)
        _write_weights(reader.tensors, config, directory)
    except (ValueError, LookupError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _write_weights(
    tensors: Sequence[ReaderTensor], config: Mapping[str, Any], directory: Path
) -> None:
    """Dequantize into one safetensors file, or several with an index when they are large."""
    shards = list(_plan_shards(tensors))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = "model.safetensors"
        if len(shards) > 1:
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        converted = {_hf_name(tensor.name): _to_bfloat16(tensor, config) for tensor in shard}
        save_file(converted, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(converted, file_name)
    if len(shards) > 1:
        _write_json(directory / INDEX_NAME, {"weight_map": weight_map})


def _plan_shards(tensors: Sequence[ReaderTensor]) -> Iterator[list[ReaderTensor]]:
    shard: list[ReaderTensor] = []
    size = 0
    for tensor in tensors:
        if tensor.name in _DERIVED:
            continue
        num_bytes = int(tensor.n_elements) * torch.bfloat16.itemsize
        if shard and size + num_bytes > _SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += num_bytes
    yield shard


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    block, layer, part = [*stem.split("."), "", ""][:3]
    if block != "blk" or part not in _LAYER_NAMES:
        raise ValueError(f"the tensor {name} is of no known use")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _to_bfloat16(tensor: ReaderTensor, config: Mapping[str, Any]) -> Tensor:
    values: np.ndarray = dequantize(tensor.data, tensor.tensor_type)
    part = tensor.name.split(".")[-2]
    if config["model_type"] in ("llama", "mistral") and part in _HEADS_OF:
        values = _undo_permutation(values, config[_HEADS_OF[part]])
    return torch.tensor(values, dtype=torch.bfloat16)


def _undo_permutation(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from pairs (0, 1), (2, 3) ... back to halves, as rotary here wants them.

    Inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    half = values.shape[0] // num_heads // 2
    rest = values.shape[1:]
    return values.reshape(num_heads, half, 2, *rest).swapaxes(1, 2).reshape(-1, *rest)
