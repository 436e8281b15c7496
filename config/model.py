"""Normalized facts of an architecture, read from a checkpoint's config.json."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from octavo.config.base import ConfigModel

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
HiddenAct = Literal["silu", "gelu", "gelu_tanh"]
SavedDType = Literal["float32", "bfloat16", "float16"]


class RopeConfig(ConfigModel):
    """Rotary position embedding. Keys of a variant that is not in use are None.

    `rotary_dim` is the number of leading components of each head that are rotated.
    """

    rope_type: RopeType = "default"
    theta: float = Field(default=10000.0, gt=0, allow_inf_nan=False)
    rotary_dim: int = Field(ge=2, multiple_of=2)
    factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed: dict[RopeType, tuple[str, ...]] = {
            "default": (),
            "linear": ("factor",),
            "dynamic": ("factor", "original_max_position_embeddings"),
            "llama3": (
                "factor",
                "original_max_position_embeddings",
                "low_freq_factor",
                "high_freq_factor",
            ),
            "yarn": ("factor", "original_max_position_embeddings"),
        }
        given = self.model_dump()
        missing = [name for name in needed[self.rope_type] if given[name] is None]
        if missing:
            raise ValueError(f"rope type {self.rope_type!r} lacks {', '.join(missing)}")
        return self


class ModelConfig(ConfigModel):
    """What a model is, independent of how it will be served.

    `windows` holds one entry per layer: the sliding window in tokens, or None for full attention.
    `max_model_len` is the longest context the checkpoint supports, after rope scaling.
    `dtype` is the precision the checkpoint was saved in.
    """

    model_type: str
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    rms_norm_eps: float = Field(gt=0)
    hidden_act: HiddenAct = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeConfig
    windows: tuple[int | None, ...]
    max_model_len: int = Field(ge=1)
    dtype: SavedDType
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads"
            )
        if self.rope.rotary_dim > self.head_dim:
            raise ValueError(
                f"{self.rope.rotary_dim} rotated components exceed the head size {self.head_dim}"
            )
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        return self


_FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # What transformers assumes where a config.json of the family is silent.
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "max_position_embeddings": 32768,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}

_ACTIVATIONS: Mapping[str, HiddenAct] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    # Keys that a variant reads besides the base, the factor and the original length.
    "default": (),
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": (
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}

_DTYPES: Mapping[str, SavedDType] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}

SUPPORTED_MODEL_TYPES: tuple[str, ...] = tuple(_FAMILY_DEFAULTS)
"""Values of `model_type` in config.json that can be read."""


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The facts in a parsed config.json, old keys and those of transformers 5 alike.

    Raises ValueError that names the key at fault; for a model_type, a rope type or an activation
    that is not supported it lists those that are.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILY_DEFAULTS:
        raise ValueError(
            f"model_type {model_type!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if config.get("quantization_config"):
        raise ValueError("quantized weights (quantization_config) are not supported")
    keys = {**_FAMILY_DEFAULTS[model_type], **config}
    try:
        return _read(model_type, keys)
    except ValidationError as error:
        problems = [
            _problem(".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, "))
            for item in error.errors()
        ]
        raise ValueError("; ".join(problems)) from None
    except TypeError as error:
        raise ValueError(f"a value is of the wrong type: {error}") from None


def _problem(place: str, message: str) -> str:
    return f"{place}: {message}" if place else message


def _read(model_type: str, keys: Mapping[str, Any]) -> ModelConfig:
    num_heads = _number(keys, "num_attention_heads")
    hidden_size = _number(keys, "hidden_size")
    head_dim = keys.get("head_dim") or hidden_size // num_heads
    rope = _read_rope(keys, head_dim)
    attention_bias = bool(keys.get("attention_bias", False))
    takes_bias = model_type in ("llama", "qwen3")
    return ModelConfig(
        model_type=model_type,
        vocab_size=_number(keys, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_number(keys, "intermediate_size"),
        num_layers=_number(keys, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.get("rms_norm_eps", 1e-6),
        hidden_act=_read_activation(keys),
        tie_word_embeddings=bool(keys.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or (takes_bias and attention_bias),
        attention_out_bias=takes_bias and attention_bias,
        mlp_bias=model_type == "llama" and bool(keys.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        rope=rope,
        windows=_read_windows(model_type, keys),
        max_model_len=_context_length(_number(keys, "max_position_embeddings"), rope),
        dtype=_read_dtype(keys),
        bos_token_id=keys.get("bos_token_id"),
        eos_token_ids=_read_eos(keys.get("eos_token_id")),
    )


def _number(keys: Mapping[str, Any], name: str) -> int:
    value = keys.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    return value


def _read_activation(keys: Mapping[str, Any]) -> HiddenAct:
    name = keys.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"hidden_act {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _read_dtype(keys: Mapping[str, Any]) -> SavedDType:
    """`dtype` of transformers 5, else `torch_dtype`; float32 loses nothing where neither is set."""
    name = str(keys.get("dtype") or keys.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _read_eos(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _read_windows(model_type: str, keys: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Mistral slides in all layers; Qwen where `layer_types` or `max_window_layers` says so."""
    count = _number(keys, "num_hidden_layers")
    window = keys.get("sliding_window")
    if model_type == "mistral":
        return (window,) * count
    if model_type == "llama" or not keys.get("use_sliding_window", False):
        return (None,) * count
    layer_types = keys.get("layer_types")
    if layer_types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    first = keys["max_window_layers"]
    return tuple(window if layer >= first else None for layer in range(count))


def _read_rope(keys: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """`rope_scaling` with `rope_theta` beside it, or `rope_parameters`, which holds all."""
    given = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_scaling must be an object, not {given!r}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError("rope_parameters that differ between layer types are not supported")
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in _ROPE_KEYS:
        raise ValueError(
            f"rope type {rope_type!r} is not supported; supported are {', '.join(_ROPE_KEYS)}"
        )
    partial = given.get("partial_rotary_factor") or keys.get("partial_rotary_factor") or 1.0
    max_positions = _number(keys, "max_position_embeddings")
    # Only these two keep their value beside the rope keys; dynamic scaling starts at the maximum.
    original = max_positions
    if rope_type in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        original = keys.get(name) or given.get(name) or max_positions
    factor = given.get("factor")
    if factor is None and rope_type == "yarn":
        factor = max_positions / original
    return RopeConfig(
        rope_type=rope_type,
        theta=given.get("rope_theta") or keys.get("rope_theta") or 10000.0,
        rotary_dim=int(head_dim * partial),
        factor=factor if rope_type != "default" else None,
        original_max_position_embeddings=None if rope_type in ("default", "linear") else original,
        **{name: given[name] for name in _ROPE_KEYS[rope_type] if given.get(name) is not None},
    )


def _context_length(max_positions: int, rope: RopeConfig) -> int:
    """Tokens of the longest context, rope scaling applied once.

    llama3 states its maximum after scaling; yarn gives the one before, whatever the maximum says.
    """
    if rope.factor is None or rope.rope_type == "llama3":
        return max_positions
    if rope.rope_type == "yarn" and rope.original_max_position_embeddings is not None:
        return int(rope.original_max_position_embeddings * rope.factor)
    return int(max_positions * rope.factor)
