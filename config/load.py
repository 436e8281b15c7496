"""What to load and in which precision."""

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, field_validator

from octavo.config.base import ConfigModel

_SAMPLING_RANGES = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 1e6),
}


class DType(StrEnum):
    """Precision of the weights and of the activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LoadConfig(ConfigModel):
    """The model named on the command line and how to read it."""

    model: str | None = Field(
        default=None,
        description="A directory in Hugging Face format, a GGUF file, or a hub id. "
        "Without it the starter model is served.",
    )
    tokenizer: str | None = Field(
        default=None, description="Directory or hub id of the tokenizer; default: the model's own."
    )
    revision: str | None = Field(
        default=None, description="Branch, tag or commit of a hub id; default: the main branch."
    )
    download_dir: str | None = Field(
        default=None, description="Where hub downloads are kept; default: the Hugging Face cache."
    )
    dtype: DType = Field(
        default=DType.AUTO, description="Precision; auto takes that of the checkpoint."
    )
    quantization: Literal["none", "int8"] = Field(
        default="none",
        description="Weights of the linear layers, output head included: none keeps the "
        "precision, int8 (on CPU) makes whole numbers with a scale for 32 inputs at load; half "
        "the memory, and faster where few sequences run.",
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy", "null"] = Field(
        default="auto",
        description="How to read the weights. For measuring only: dummy makes random ones, and "
        "null runs all but model and sampler, so that steps take the engine's own time only.",
    )
    null_step_ms: float = Field(
        default=0,
        ge=0,
        description="For measuring only: with --load-format null each step ends when the "
        "machine's monotonic clock shows a multiple of this many ms, so that a client can tell "
        "what comes later; 0 is at once.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Longest context in tokens; default: the model's limit, "
        "reduced to what the cache holds.",
    )
    generation_config: str = Field(
        default="auto",
        description="Where sampling defaults come from: auto (the checkpoint's "
        "generation_config.json), none, or a directory.",
    )
    override_generation_config: dict[str, Any] | None = Field(
        default=None,
        description="JSON object of sampling defaults over those of --generation-config, such as "
        '{"temperature": 0.5}; temperature, top_p, top_k, min_p or repetition_penalty.',
    )
    seed: int | None = Field(
        default=None,
        description="Fixes the draws of requests without a seed of their own; "
        "default: they differ from run to run.",
    )

    @field_validator("override_generation_config")
    @classmethod
    def _check_defaults(cls, values: dict[str, Any] | None) -> dict[str, Any] | None:
        for name, value in (values or {}).items():
            if name not in _SAMPLING_RANGES:
                raise ValueError(f"{name} is none of {', '.join(_SAMPLING_RANGES)}")
            low, high = _SAMPLING_RANGES[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                raise ValueError(f"{name} must be a number from {low:g} to {high:g}")
            if name == "top_k" and not isinstance(value, int):
                raise ValueError("top_k must be an integer")
        return values

    @property
    def needs_weights(self) -> bool:
        """Whether the checkpoint's weights are read."""
        return self.load_format not in ("dummy", "null")
