"""The only place that touches the process's environment."""

import os

PREFIX = "OCTAVO_"


def octavo_variables() -> dict[str, str]:
    """Return the variables whose name begins with OCTAVO_; each is another spelling of a flag."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def library_variables() -> dict[str, str]:
    """Return the variables of the libraries below that change what they do; none is a secret."""
    prefixes = ("CUDA_", "NVIDIA_VISIBLE", "OMP_", "MKL_", "NUMBA_", "TRITON_")
    names = ("HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "XDG_CACHE_HOME", "LD_PRELOAD")
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(prefixes)
    }


def cache_root() -> str:
    """Return the user's cache directory, as the XDG rules say."""
    return os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")


def take_inherited_sockets() -> int:
    """Return how many sockets a supervisor such as systemd opened for this process.

    They are the descriptors from 3 on. The variables are removed, so that no child takes them too.
    """
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    return int(count) if pid == str(os.getpid()) and count.isdecimal() else 0


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def set_thread_defaults() -> None:
    """Set what OpenMP reads once, when torch is imported; a value that is set already stays.

    OMP_WAIT_POLICY: between two operations idle threads would spin and take whole cores from the
    event loop, which on a small machine has to share them.
    OMP_NUM_THREADS: torch counts the machine's cores, also when this process may use only some of
    them; threads that have to share a core make every small operation slower.

    Must run before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if num_cores() < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(num_cores()))
