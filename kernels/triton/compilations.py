"""Tells of kernels that are compiled."""

from collections.abc import Callable
from typing import Any

from triton import knobs


def watch_compilations(tell: Callable[[str], None] | None) -> None:
    """Calls `tell` with the name of each kernel that is compiled from now on; None ends that."""
    if tell is None:
        knobs.runtime.jit_cache_hook = None
        return

    def before(*, fn: Any, **_: Any) -> None:  # noqa: ANN401
        tell(str(fn.name))

    knobs.runtime.jit_cache_hook = before
