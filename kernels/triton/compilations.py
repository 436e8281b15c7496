"""Where compiled kernels are kept, and who hears of those that are compiled."""

import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

from triton import knobs

_logger = logging.getLogger(__name__)


def use_writable_cache() -> None:
    """Keeps compiled kernels in a temporary folder where Triton's own cannot be written.

    Another user in a container meets one, and Triton would end the start.
    """
    wanted = knobs.cache.dir
    try:
        os.makedirs(wanted, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return
    except OSError as error:
        knobs.cache.dir = tempfile.mkdtemp(prefix="octavo-kernels-")
        _logger.warning(
            "GPU kernels are compiled at each start, since %s cannot be written (%s); "
            "TRITON_CACHE_DIR names another folder",
            wanted,
            error.strerror,
        )


def watch_compilations(tell: Callable[[str], None] | None) -> None:
    """Calls `tell` with the name of each kernel that is compiled from now on; None ends that."""
    if tell is None:
        knobs.runtime.jit_cache_hook = None
        return

    def before(*, fn: Any, **_: Any) -> None:  # noqa: ANN401
        tell(str(fn.name))

    knobs.runtime.jit_cache_hook = before
