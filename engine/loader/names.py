"""What the name of a model can be, and who is told of its download."""

import re
from collections.abc import Callable

OnDownload = Callable[[int, int], None]
"""Takes the bytes that are there and those known to be needed; from any thread."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")


def is_hub_id(model: str) -> bool:
    """True for the form org/name."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith(".gguf")


def ignore_download(done: int, total: int) -> None:
    """Tell nobody."""
