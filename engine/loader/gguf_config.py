"""GGUF metadata to the contents of config.json and generation_config.json."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import ReaderTensor

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of general.architecture that can be read."""

_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What all Llama 3 releases share; the file holds only the factors that follow from it."""
_YARN_KEYS = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "attn_factor": "attention_factor",
}


def config_from_metadata(
    metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]
) -> dict[str, Any]:
    """Return the contents of config.json.

    Raises ValueError for an architecture or a variant that cannot be read and for missing keys.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; "
            f"supported are {', '.join(GGUF_ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) > 1:
        raise ValueError("a model split over several GGUF files is not supported; merge them first")
    if metadata.get(f"{architecture}.expert_count", 0):
        raise ValueError("mixture-of-experts models are not supported")
    keys = _Keys(metadata, architecture)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("the tensor token_embd.weight is missing")
    num_heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", keys.integer("embedding_length") // num_heads)
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise ValueError("rotation of a part of each head is not supported in GGUF files")
    window = keys.integer("attention.sliding_window", 0)
    config = {
        "model_type": "mistral" if architecture == "llama" and window else architecture,
        "vocab_size": int(embedding.shape[1]),
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, tensors.get("rope_freqs.weight"), head_dim),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": "bfloat16",
    }
    return config | ({"sliding_window": window} if window else {})


def generation_from_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of generation_config.json: the ids that begin and end a text."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({token_id for token_id in ends if token_id is not None}),
    }


class _Keys:
    """The metadata of the architecture, by the part of the key after its name."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def get(self, name: str) -> Any:  # noqa: ANN401 - values are of many types
        return self._metadata.get(f"{self._architecture}.{name}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise ValueError(f"{self._architecture}.{name} must be an integer, not {value!r}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float):
            key = f"{self._architecture}.{name}"
            raise ValueError(f"{key} is missing" if value is None else f"{key} must be a number")
        return value


def _rope_scaling(
    keys: _Keys, factors: ReaderTensor | None, head_dim: int
) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(factors.data, keys.number("rope.freq_base", 10000.0), head_dim)
    kind = keys.get("rope.scaling.type")
    if kind is None:
        linear = keys.number("rope.scale_linear", 1.0)
        return {"rope_type": "linear", "factor": linear} if linear != 1.0 else None
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
    if kind != "yarn":
        raise ValueError(f"rope scaling {kind!r} is not supported; supported are linear and yarn")
    extra = {
        name: keys.number(f"rope.scaling.{key}")
        for key, name in _YARN_KEYS.items()
        if keys.get(f"rope.scaling.{key}") is not None
    }
    return {
        "rope_type": "yarn",
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        **extra,
    }


def _llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 scaling whose frequency divisors are `factors` [head_dim / 2].

    Formula: transformers, modeling_rope_utils, `_compute_llama3_parameters`.
    """
    low, high, original = _LLAMA3_ROPE.values()
    factor = float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError("the rope factors of this file (rope_freqs) are not those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}
