"""Checkpoints in Hugging Face format."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.config.load import LoadConfig
from octavo.config.model import SUPPORTED_MODEL_TYPES, ModelConfig, model_config_from_hf
from octavo.engine.core.errors import CheckpointError
from octavo.engine.core.pooling import Pooling
from octavo.engine.loader.checkpoint import Checkpoint
from octavo.engine.loader.embedding import ENCODER_TYPES, read_embedding_spec
from octavo.engine.loader.files import read_json
from octavo.engine.loader.safetensors import find_weights

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GENERATION_CONFIG = "generation_config.json"


def read_directory(directory: Path, tokenizer_dir: Path, name: str, load: LoadConfig) -> Checkpoint:
    """Read all but the weights. Nothing is written into the directory; no network is used.

    Raises CheckpointError naming the file that is missing, damaged or not supported.
    """
    generation = read_json(directory / _GENERATION_CONFIG, required=False)
    path = directory / "config.json"
    keys = read_json(path)
    config = _read_model_config(path, keys)
    eos_ids = {*config.eos_token_ids, *_ids(generation.get("eos_token_id"))}
    eos_ids |= set(_tokenizer_eos(tokenizer_dir))
    generates = not _lacks_head(keys)
    settled = {
        "eos_token_ids": tuple(sorted(eos_ids)),
        # Nobody asks for the logits of a model without a head of its own.
        "tie_word_embeddings": config.tie_word_embeddings or not generates,
    }
    return Checkpoint(
        name=name,
        model_config=config.model_copy(update=settled),
        tokenizer_dir=tokenizer_dir,
        generation_defaults=_generation_defaults(generation, load.generation_config),
        weights=find_weights(directory) if load.needs_weights else None,
        embedding=read_embedding_spec(directory, Pooling.LAST),
        generates=generates,
    )


def _lacks_head(config: Mapping[str, Any]) -> bool:
    """True for a bare decoder such as MistralModel, as models for embeddings are saved."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(
        str(name).endswith("Model") for name in architectures
    )


def _read_model_config(path: Path, config: Mapping[str, Any]) -> ModelConfig:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise CheckpointError(
            f"{path}: the weights are quantized ({method or 'quantization_config'}), which is not "
            "supported; use the unquantized model"
        )
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise CheckpointError(f"{path}: attention to later tokens is not supported")
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        decoders, encoders = ", ".join(SUPPORTED_MODEL_TYPES), ", ".join(sorted(ENCODER_TYPES))
        raise CheckpointError(
            f"{path}: model_type {model_type!r} is not supported; supported are {decoders}, "
            f"and for embeddings {encoders}"
        )
    try:
        return model_config_from_hf(config)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _ids(value: object) -> Iterator[int]:
    values = value if isinstance(value, list) else [value]
    return (item for item in values if isinstance(item, int) and not isinstance(item, bool))


def _tokenizer_eos(directory: Path) -> Iterator[int]:
    """The id of the tokenizer's own end token, which may differ from the configuration's."""
    token = read_json(directory / "tokenizer_config.json", required=False).get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        return
    tokenizer = read_json(directory / "tokenizer.json", required=False)
    for added in tokenizer.get("added_tokens", ()):
        if added.get("content") == text:
            yield added["id"]


def _generation_defaults(generation: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    if source == "none":
        return {}
    path = Path(_GENERATION_CONFIG)
    if source != "auto":
        path = Path(source) / _GENERATION_CONFIG
        generation = read_json(path)
    defaults = {name: generation[name] for name in _SAMPLING_DEFAULTS if name in generation}
    defaults = {name: value for name, value in defaults.items() if value is not None}
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(
                f"{path}: {name} must be a number, not {value!r}; start with "
                "--generation-config none to ignore the file"
            )
    return defaults
