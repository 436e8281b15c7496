"""On which processor a thread runs, and leaving it to another thread.

Two threads that wake each other many times in a step can end up on one processor, each waiting for
the other's turn while the next processor idles: each sleeps too shortly for the system to see it.
"""

import sys

import numpy as np
from numba import types

from octavo.kernels.cpu.compiled import inlined
from octavo.kernels.cpu.intrinsics import keep_alive, load_i64, store_i64

_WORDS = 16  # of a set of processors, as many as the C library's has
_KNOWN = sys.platform == "linux"

_getcpu = types.ExternalFunction("sched_getcpu", types.int32())
_AFFINITY = types.int32(types.int32, types.int64, types.int64)
_getaffinity = types.ExternalFunction("sched_getaffinity", _AFFINITY)
_setaffinity = types.ExternalFunction("sched_setaffinity", _AFFINITY)


@inlined
def current_processor() -> int:
    """Number of the processor that the calling thread runs on; -1 where that is not known."""
    if not _KNOWN:
        return -1
    return int(_getcpu())


@inlined
def leave_processor(processor: int) -> bool:
    """Go on on another of the processors that the calling thread may use; False if refused.

    The system chooses which. The thread may come back later: what it may use stays as it is at the
    time of the call. Without another one, or with more than 1,024, nothing changes.
    """
    if not _KNOWN:
        return False
    sets = np.zeros(2 * _WORDS, np.int64)
    allowed, others = sets.ctypes.data, sets.ctypes.data + 8 * _WORDS
    left = False
    if _getaffinity(0, 8 * _WORDS, allowed) == 0:
        some = 0
        for word in range(_WORDS):
            bits = load_i64(allowed, word)
            if word == processor // 64:
                bits &= ~(np.int64(1) << (processor % 64))
            store_i64(others, word, bits)
            some |= bits
        if some != 0 and _setaffinity(0, 8 * _WORDS, others) == 0:
            _setaffinity(0, 8 * _WORDS, allowed)
            left = True
    keep_alive(sets)
    return left
