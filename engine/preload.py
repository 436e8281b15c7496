"""Loading the largest shared library beside a running event loop."""

import ctypes
import importlib.util
import os
from pathlib import Path


def preload_torch() -> None:
    """Load torch's main library without the GIL, so that the import of torch finds it loaded.

    The import itself holds the GIL while hundreds of megabytes are mapped, from a cold disk for
    many seconds, in which no other thread answers and no signal is seen. Nothing happens where
    there is no such library; the import then says what is wrong.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    path = Path(torch.origin).parent / "lib" / "libtorch_cpu.so"
    if path.is_file():
        # Called as a foreign function: ctypes.CDLL(path) would hold the GIL just as an import does.
        ctypes.CDLL(None).dlopen(os.fsencode(path), os.RTLD_NOW | os.RTLD_LOCAL)
