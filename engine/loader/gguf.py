"""GGUF files, converted once into a directory in Hugging Face format."""

import hashlib
import logging
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from octavo.config.env import cache_root
from octavo.engine.core.errors import CheckpointError
from octavo.engine.loader.files import check_gguf, make_temporary_dir, write_json
from octavo.engine.loader.gguf_config import config_from_metadata, generation_from_metadata
from octavo.engine.loader.gguf_tokenizer import save_tokenizer

_logger = logging.getLogger(__name__)

_FORMAT = "gguf-1"
"""Part of the cache's folder name; a change of what is written below needs a new one."""
_PARSE_ERRORS = (OSError, ValueError, LookupError, OverflowError, struct.error, MemoryError)
"""What reading a damaged file may raise in the gguf package."""


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
        write_json(directory / "config.json", config)
        write_json(directory / "generation_config.json", generation_from_metadata(metadata))
        save_tokenizer(metadata, directory)
        # Not above: it imports torch, and what is wrong with the file is told before that.
        from octavo.engine.loader.gguf_weights import write_weights  # noqa: PLC0415

        write_weights(reader.tensors, config, directory)
    except (ValueError, LookupError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: {error}") from error
