"""Normalized facts of an architecture, read from a checkpoint's config.json."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from octavo.config.base import ConfigModel

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


class RopeConfig(ConfigModel):
    """Rotary position embedding. Keys of a variant that is not in use are None.

    `rotary_dim` is the number of leading components of each head that are rotated.
    """

    rope_type: RopeType = "default"
    theta: float = 10000.0
    rotary_dim: int
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class ModelConfig(ConfigModel):
    """What a model is, independent of how it will be served.

    `windows` holds one entry per layer: the sliding window in tokens, or None for full attention.
    `max_model_len` is the longest context the checkpoint supports, after rope scaling.
    `dtype` is the precision the checkpoint was saved in.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeConfig
    windows: tuple[int | None, ...]
    max_model_len: int
    dtype: Literal["float32", "bfloat16", "float16"]
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
