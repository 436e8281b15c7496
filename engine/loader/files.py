"""Reading the small files of a checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.engine.core.errors import CheckpointError


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
