"""The tensors of a GGUF file, written as safetensors in bfloat16."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor

from octavo.engine.loader.files import write_json
from octavo.engine.loader.safetensors import INDEX_NAME

_SHARD_BYTES = 2 * 1024**3

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


def write_weights(
    tensors: Sequence[ReaderTensor], config: Mapping[str, Any], directory: Path
) -> None:
    """Dequantize into one safetensors file, or several with an index when they are large.

    Raises ValueError for a tensor of no known use, NotImplementedError for an unknown format.
    """
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
        write_json(directory / INDEX_NAME, {"weight_map": weight_map})


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
