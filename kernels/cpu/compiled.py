# ruff: noqa: ANN401  # Numba has no types
"""How the kernels are compiled: lazily, without the GIL, and kept on disk between starts."""

import atexit
import contextlib
import hashlib
import logging
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numba
from numba.core import config as numba_config

from octavo.config.env import cache_root

logger = logging.getLogger(__name__)

# Sums may be reordered into vectors; infinities and NaN keep their meaning.
_FLAGS = {"reassoc", "contract", "nsz"}

_STALE_AFTER_S = 86400


@cache
def cache_directory() -> str:
    """Where compiled kernels are kept: one folder for each state of these sources.

    Numba sees that a kernel's own file has changed but not that a helper in another file
    has, so the name of the folder holds a digest of all of them.
    """
    digest = hashlib.sha256(f"{numba.__version__} {platform.machine()}".encode())
    folder = Path(__file__).parent
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    for base in (folder / "__pycache__", Path(cache_root()) / "octavo", _own_temporary_folder()):
        if base is None:
            continue
        try:
            (base / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=base / name):
                (base / name).touch()
                _remove_stale(base)
                return str(base / name)
        except OSError:
            continue
    return _folder_of_this_start()


def is_first_start() -> bool:
    """Whether no kernel has been compiled and kept yet."""
    return not any(Path(cache_directory()).rglob("*.nbi"))


def _own_temporary_folder() -> Path | None:
    """A folder that only this user can write to, as what is in it will be run; None without one."""
    folder = Path(tempfile.gettempdir()) / f"octavo-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid():
            folder.chmod(0o700)
            return folder
    return None


def _folder_of_this_start() -> str:
    folder = tempfile.mkdtemp(prefix="octavo-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning(
        "No folder for compiled kernels can be written, so that each start compiles them again: "
        "give one by XDG_CACHE_HOME"
    )
    return folder


def _remove_stale(base: Path) -> None:
    """Remove folders of kernels that no start has used for a while."""
    oldest = time.time() - _STALE_AFTER_S
    for folder in base.glob("kernels-*"):
        with contextlib.suppress(OSError):  # another start may be removing it too
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder)


def compiled(function: Callable[..., Any]) -> Any:
    """A function for Python to call, without the GIL while it runs."""
    return _with_cache(lambda: numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def compiled_holding_gil(function: Callable[..., Any]) -> Any:
    """A function for Python to call that is done in microseconds.

    Giving the GIL away for so short a time would often mean waiting for another thread's turn.
    """
    return _with_cache(lambda: numba.njit(cache=True, error_model="numpy")(function))


def inlined(function: Callable[..., Any]) -> Any:
    """A helper that becomes part of the kernels calling it."""
    return numba.njit(nogil=True, error_model="numpy", fastmath=_FLAGS)(function)


def _with_cache(build: Callable[[], Any]) -> Any:
    # The folder is read when a function is decorated; other users of Numba keep theirs.
    before = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = cache_directory()
    try:
        return build()
    finally:
        numba_config.CACHE_DIR = before


class Kernel:
    """A function (arguments address, chunk number) that threads call through its address.

    The arguments are an array of int64; `argument(address, i)` in the kernel reads one.
    Compiled at first use.
    """

    def __init__(self, function: Callable[[Any, Any], None]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @cached_property
    def address(self) -> int:
        """Address of the machine code."""
        return int(self._compiled.address)

    @cached_property
    def _compiled(self) -> Any:
        signature = numba.void(numba.int64, numba.int64)
        options = {"cache": True, "nopython": True, "error_model": "numpy", "fastmath": _FLAGS}
        return _with_cache(lambda: numba.cfunc(signature, **options)(self._function))
