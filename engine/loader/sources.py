"""Finding the checkpoint that the user named, and loading it."""

from dataclasses import replace
from pathlib import Path

import torch

from octavo.config.load import LoadConfig
from octavo.engine.core.errors import CheckpointError, ConfigurationError
from octavo.engine.loader.checkpoint import Checkpoint, EncoderCheckpoint
from octavo.engine.loader.directory import read_directory
from octavo.engine.loader.embedding import is_encoder, read_encoder
from octavo.engine.loader.gguf import convert_gguf
from octavo.engine.loader.hub import OnDownload, download, ignore_download, is_hub_id
from octavo.engine.loader.starter import STARTER_DEFAULTS, STARTER_NAME, find_starter
from octavo.engine.models.decoder import CausalLM
from octavo.engine.models.registry import build_model


def resolve_checkpoint(
    config: LoadConfig, on_download: OnDownload = ignore_download
) -> Checkpoint | EncoderCheckpoint:
    """Return the checkpoint of `config.model`, downloaded or converted where needed.

    A model is a directory, a GGUF file or a hub id; None is the starter model. Weights are read
    later. Raises CheckpointError for what is missing, damaged or not supported, and
    ConfigurationError for a `--load-format` that does not suit the model.
    """
    if config.model is None:
        path, name = find_starter(), STARTER_NAME
    else:
        path, name = _find(config.model, config, True, on_download), config.model
    if path.is_file():
        _check_format(config, "gguf")
        path = convert_gguf(path)
    else:
        _check_format(config, "safetensors")
    tokenizer_dir = path
    if config.tokenizer is not None:
        tokenizer_dir = _find(config.tokenizer, config, False, on_download)
    if is_encoder(path):
        return read_encoder(path, tokenizer_dir, name, config)
    checkpoint = read_directory(path, tokenizer_dir, name, config)
    if config.model is None and config.generation_config == "auto":
        return replace(checkpoint, generation_defaults=STARTER_DEFAULTS)
    return checkpoint


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Build the model and fill it, tensor by tensor. Raises CheckpointError."""
    model = build_model(checkpoint.model_config, dtype, device)
    if checkpoint.weights is None:
        model.init_dummy_weights(seed=0)
    else:
        model.load_weights(checkpoint.weights())
    return model


def _find(name: str, config: LoadConfig, weights: bool, on_download: OnDownload) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf" and weights:
            return path
        raise CheckpointError(f"{name}: must be a directory" + " or a .gguf file" * weights)
    if not is_hub_id(name):
        raise CheckpointError(
            f"{name}: no such directory or file; a model is a directory in Hugging Face format, "
            "a .gguf file, or a hub id such as org/name"
        )
    weights = weights and config.needs_weights
    return download(name, config, weights=weights, on_download=on_download)


def _check_format(config: LoadConfig, actual: str) -> None:
    if config.needs_weights and config.load_format not in ("auto", actual):
        raise ConfigurationError(
            f"--load-format {config.load_format} does not suit {config.model}, whose weights are "
            f"in {actual} format; leave the flag out"
        )
