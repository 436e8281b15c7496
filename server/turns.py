"""The event loop's turns on a processor that it shares with the kernels' threads."""

import ctypes
import os
import platform

# Numbers of the system call, which the C library has no function for.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_RESET_ON_FORK = 1
_SHORTEST_NS = 100_000


class _Attributes(ctypes.Structure):
    """`struct sched_attr` of Linux, see sched_setattr(2)."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def take_short_turns() -> bool:
    """Have the calling thread run sooner, for less time at once; whether the system did it.

    Its share stays the same. From Linux 6.12 on a thread with short turns need not wait until one
    that computes has had its own of several milliseconds. Threads that are started later are not
    concerned.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return False
    attributes = _Attributes(
        size=ctypes.sizeof(_Attributes),
        flags=_RESET_ON_FORK,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        runtime=_SHORTEST_NS,
    )
    libc = ctypes.CDLL(None)
    return int(libc.syscall(number, 0, ctypes.byref(attributes), 0)) == 0
