"""Finding the checkpoint that the user named.

What takes long to import is imported where it is needed: mistakes are told before that.
"""

from dataclasses import replace
from pathlib import Path

from octavo.config.load import LoadConfig
from octavo.engine.core.errors import CheckpointError, ConfigurationError
from octavo.engine.loader.checkpoint import Checkpoint, EncoderCheckpoint
from octavo.engine.loader.directory import read_directory
from octavo.engine.loader.embedding import is_encoder, read_encoder
from octavo.engine.loader.files import check_gguf, check_tokenizer
from octavo.engine.loader.names import OnDownload, ignore_download, is_hub_id
from octavo.engine.loader.starter import STARTER_DEFAULTS, STARTER_NAME, find_starter


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
        from octavo.engine.loader.gguf import convert_gguf  # noqa: PLC0415 - seldom needed

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


def check_local(config: LoadConfig) -> None:
    """Check the model that `config` names as far as it goes without torch, network or conversion.

    Takes tenths of a second. Raises what `resolve_checkpoint` would raise, and CheckpointError for
    a directory without a tokenizer.
    """
    if config.model is None:
        find_starter()
        return
    path = Path(config.model).expanduser()
    if not path.exists() and is_hub_id(config.model):
        return
    if path.is_dir():
        checkpoint = resolve_checkpoint(config.model_copy(update={"tokenizer": None}))
        if config.tokenizer is None:
            check_tokenizer(checkpoint.tokenizer_dir)
    else:
        check_gguf(_find(config.model, config, True, ignore_download))
    if config.tokenizer is not None and not is_hub_id(config.tokenizer):
        check_tokenizer(_find(config.tokenizer, config, False, ignore_download))


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
    from octavo.engine.loader.hub import download  # noqa: PLC0415 - an HTTP library and more

    weights = weights and config.needs_weights
    return download(name, config, weights=weights, on_download=on_download)


def _check_format(config: LoadConfig, actual: str) -> None:
    if config.needs_weights and config.load_format not in ("auto", actual):
        raise ConfigurationError(
            f"--load-format {config.load_format} does not suit {config.model}, whose weights are "
            f"in {actual} format; leave the flag out"
        )
