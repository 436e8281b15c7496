"""The only place that touches the process's environment."""

import os
from collections.abc import Mapping

PREFIX = "OCTAVO_"


def octavo_variables() -> dict[str, str]:
    """Return the variables whose name begins with OCTAVO_; each is another spelling of a flag."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def cache_root() -> str:
    """Return the user's cache directory, as the XDG rules say."""
    return os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def set_thread_defaults() -> Mapping[str, str]:
    """Set what OpenMP reads once, when torch is imported; a value that is set already stays.

    OMP_NUM_THREADS: the runtime counts the machine's cores, not those this process may use, and
    too many threads make every small operation slower.
    OMP_WAIT_POLICY: between two operations idle threads would spin and take whole cores from the
    event loop, which on a small machine has to share them.

    Must run before torch is imported. Returns what it has set.
    """
    defaults = {
        "OMP_NUM_THREADS": str(num_cores()),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    chosen = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(chosen)
    return chosen
