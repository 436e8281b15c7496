"""The small files of a checkpoint, and directories for what is made of one."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.engine.core.errors import CheckpointError

_GGUF_MAGIC = b"GGUF"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab*", "*.tiktoken")
_temporary_dirs: set[Path] = set()


def read_json(path: Path, *, required: bool = True) -> Mapping[str, Any]:
    """Return the object in a JSON file; an empty one for an absent file that is not required.

    Raises CheckpointError.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise CheckpointError(f"{path.parent}: no {path.name} in this directory") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object into a JSON file."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def check_gguf(path: Path) -> None:
    """Raise CheckpointError unless the file begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if magic != _GGUF_MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file, or an empty one; download it again")


def check_tokenizer(directory: Path) -> None:
    """Raise CheckpointError for a directory without the files of any tokenizer."""
    if not any(any(directory.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{directory}: no tokenizer (tokenizer.json) in this directory; name another one with "
            "--tokenizer"
        )


def make_temporary_dir() -> Path:
    """Return a new directory that is removed at the end of the process."""
    path = Path(tempfile.mkdtemp(prefix="octavo-"))
    _temporary_dirs.add(path)
    return path


def is_temporary(directory: Path) -> bool:
    """True for what `make_temporary_dir` made, which tells users nothing."""
    return directory in _temporary_dirs


@atexit.register
def remove_temporary_dirs() -> None:
    """Remove them now; for a process that ends without the interpreter's own clean-up."""
    while _temporary_dirs:
        shutil.rmtree(_temporary_dirs.pop(), ignore_errors=True)
