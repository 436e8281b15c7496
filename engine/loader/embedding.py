"""What a checkpoint says of embeddings, in the files that sentence-transformers writes."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from octavo.config.load import LoadConfig
from octavo.engine.core.errors import CheckpointError
from octavo.engine.core.pooling import EmbeddingSpec, Pooling
from octavo.engine.loader.checkpoint import EncoderCheckpoint
from octavo.engine.loader.files import read_json
from octavo.engine.loader.safetensors import find_weights

# Families whose first position stands behind the padding token's id.
_OFFSET_TYPES = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})
ENCODER_TYPES = _OFFSET_TYPES | {"albert", "bert", "distilbert", "electra", "modernbert"}
"""Values of `model_type` of encoders, which make embeddings only."""

_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
_POOLINGS = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}


def is_encoder(directory: Path) -> bool:
    """True for an encoder of the BERT family. Raises CheckpointError."""
    return read_json(directory / "config.json").get("model_type") in ENCODER_TYPES


def read_encoder(
    directory: Path, tokenizer_dir: Path, name: str, load: LoadConfig
) -> EncoderCheckpoint:
    """Read all but the weights. Raises CheckpointError."""
    path = directory / "config.json"
    config = read_json(path)
    if load.needs_weights:
        find_weights(directory)
    limit = _number(config, "max_position_embeddings", path)
    if config["model_type"] in _OFFSET_TYPES:
        limit -= config.get("pad_token_id", 1) + 1
    trained = read_json(directory / "sentence_bert_config.json", required=False)
    return EncoderCheckpoint(
        name=name,
        directory=directory,
        tokenizer_dir=tokenizer_dir,
        embedding=read_embedding_spec(directory, Pooling.MEAN),
        max_model_len=min(limit, trained.get("max_seq_length") or limit),
        vocab_size=_number(config, "vocab_size", path),
    )


def read_embedding_spec(directory: Path, default: Pooling) -> EmbeddingSpec:
    """Return how the checkpoint makes embeddings; `default` where it says nothing.

    Raises CheckpointError for steps that are not supported: vectors without them would be wrong.
    """
    config = read_json(directory / "config.json")
    return EmbeddingSpec(_read_pooling(directory, default), _read_dimensions(config))


def _read_pooling(directory: Path, default: Pooling) -> Pooling:
    path = directory / "modules.json"
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        folders = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    except FileNotFoundError:
        return default
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a readable list of modules") from error
    unknown = sorted(folders.keys() - _MODULES)
    if unknown:
        raise CheckpointError(
            f"{path}: a module of the kind {unknown[0]} is not supported; supported are "
            f"{', '.join(sorted(_MODULES))}"
        )
    if "Pooling" not in folders:
        return default
    path = directory / folders["Pooling"] / "config.json"
    config = read_json(path)
    modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise CheckpointError(
            f"{path}: exactly one of {', '.join(_POOLINGS)} must be true; this file has "
            f"{', '.join(modes) or 'none'}"
        )
    return _POOLINGS[modes[0]]


def _read_dimensions(config: Mapping[str, Any]) -> Collection[int]:
    """The keys are those by which models for vLLM declare it."""
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list):
        return tuple(sorted(listed))
    if config.get("is_matryoshka"):
        return range(1, (config.get("hidden_size") or config["dim"]) + 1)
    return ()


def _number(config: Mapping[str, Any], name: str, path: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path}: {name} must be a positive integer, not {value!r}")
    return value
