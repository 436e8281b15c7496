# ruff: noqa: ANN401  # Numba has no types
"""Fork and join for kernels that last microseconds.

One job at a time is described in shared memory. Threads claim its chunks by one atomic
addition each, so a thread that the system puts aside holds at most the chunk it is in, and
the caller can do all the work itself. Helpers spin for about a millisecond after a job and
then sleep, so an idle server uses no processor time.
"""

import atexit
import os
import threading
from functools import cache
from typing import Any

import numpy as np

from octavo.kernels.cpu.compiled import Kernel, compiled, compiled_holding_gil, inlined
from octavo.kernels.cpu.intrinsics import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_store,
    call_kernel,
    load_i64,
    read_clock,
    spin_pause,
    store_i64,
    yield_processor,
)

MAX_ARGUMENTS = 20
# After the arguments: what a kernel reports by `report`, 0 when all went well.
_REPORT = MAX_ARGUMENTS

# Byte offsets in the shared memory; what different threads write is on different lines.
_TICKET = 0  # number of chunks << 32 | next chunk to claim
_DONE = 64  # chunks finished
_OWNER = 128  # 1 while a job runs
_SLEEPING = 192  # helpers that must be woken
_STOP = 256
_BALANCE = 320  # see `learn`
_FUNCTION = 384
_ARGUMENTS = 448
_SIZE = _ARGUMENTS + 8 * (MAX_ARGUMENTS + 1)

_NEXT_MASK = 0xFFFFFFFF
# Times are in counts of the time stamp counter, about 2.5 in a nanosecond.
_SLEEP_AFTER = 2_500_000
_YIELD_AFTER = 50_000
# Helpers pay while the chunks they run take longer than the caller waits for them at the end.
# Where the system runs other programs in their place they do not; then the caller works alone
# for a number of jobs that doubles from one such period to the next.
_PERIOD = 128
_MOST_GAIN = 250_000
_WORST_LOSS = 2_500_000
_FEWEST_ALONE, _MOST_ALONE = 128, 8192


@compiled
def _work(state: int) -> int:
    """Claim and run chunks until none is left; the number run."""
    count = 0
    while True:
        ticket = atomic_load(state + _TICKET)
        if (ticket & _NEXT_MASK) >= (ticket >> 32):
            return count
        # The job may have changed since the look above: what counts is the claimed ticket,
        # and while its chunk is not done the job stays as it is.
        ticket = atomic_add(state + _TICKET, 1)
        chunk = ticket & _NEXT_MASK
        if chunk >= (ticket >> 32):
            return count
        call_kernel(load_i64(state + _FUNCTION, 0), state + _ARGUMENTS, chunk)
        atomic_add(state + _DONE, 1)
        count += 1


@compiled
def _help(state: int) -> None:
    """A helper's loop: run chunks; return when there was nothing to do for a while."""
    atomic_add(state + _SLEEPING, -1)
    last = read_clock()
    while read_clock() - last < _SLEEP_AFTER and atomic_load(state + _STOP) == 0:
        if _work(state) > 0:
            last = read_clock()
        spin_pause()
    atomic_add(state + _SLEEPING, 1)


_ALONE, _PENALTY, _WON, _JOBS = range(4)


@inlined
def learn(here: int, own: int, chunks: int, worked: int, waited: int) -> None:
    """Account for a job: `own` of its `chunks` took the caller `worked`, then it `waited`.

    `here` is the address of four words: jobs still to run alone, how many the next time, time
    won by helpers in this period, jobs of this period.
    """
    # A caller that was itself put aside has worked for milliseconds: that is no gain.
    gain = min((chunks - own) * worked // max(own, 1), _MOST_GAIN)
    won = load_i64(here, _WON) + gain - waited
    jobs = load_i64(here, _JOBS) + 1
    if won < -_WORST_LOSS or (jobs >= _PERIOD and won < 0):
        penalty = load_i64(here, _PENALTY)
        store_i64(here, _ALONE, penalty)
        store_i64(here, _PENALTY, min(2 * penalty, _MOST_ALONE))
        won, jobs = 0, 0
    elif jobs >= _PERIOD:
        store_i64(here, _PENALTY, _FEWEST_ALONE)
        won, jobs = 0, 0
    store_i64(here, _WON, won)
    store_i64(here, _JOBS, jobs)


@inlined
def _run_chunks(first: int, function: int, chunks: int, values: Any) -> int:
    """Run everything on the calling thread; what a kernel reported."""
    memory = np.empty(MAX_ARGUMENTS + 1, np.int64)
    arguments = memory.ctypes.data
    for i in range(MAX_ARGUMENTS):
        memory[i] = values[i]
    memory[_REPORT] = 0
    if first != 0:
        call_kernel(first, arguments, 0)
    for chunk in range(chunks):
        call_kernel(function, arguments, chunk)
    reported: int = memory[_REPORT]
    return reported


@compiled
def _run_shared(state: int, first: int, function: int, chunks: int, values: Any) -> int:
    """Run `first` once, then all chunks of `function`, with the helpers where they are free.

    Bit 0 of the result: some helper sleeps. The others: what a kernel reported.
    """
    shared = atomic_exchange(state + _OWNER, 1) == 0
    alone = load_i64(state + _BALANCE, _ALONE)
    if shared and alone > 0:
        store_i64(state + _BALANCE, _ALONE, alone - 1)
        atomic_store(state + _OWNER, 0)
        shared = False
    if not shared:
        result: int = _run_chunks(first, function, chunks, values)
        return result << 1
    arguments = state + _ARGUMENTS
    for i in range(MAX_ARGUMENTS):
        store_i64(arguments, i, values[i])
    store_i64(arguments, _REPORT, 0)
    if first != 0:
        call_kernel(first, arguments, 0)
    store_i64(state + _FUNCTION, 0, function)
    atomic_store(state + _DONE, 0)
    atomic_store(state + _TICKET, chunks << 32)
    sleeping = atomic_load(state + _SLEEPING)
    begin = read_clock()
    own = _work(state)
    finished = read_clock()
    while atomic_load(state + _DONE) < chunks:
        spin_pause()
        if read_clock() - finished > _YIELD_AFTER:
            yield_processor()
    learn(state + _BALANCE, own, chunks, finished - begin, read_clock() - finished)
    reported: int = load_i64(arguments, _REPORT)
    atomic_store(state + _OWNER, 0)
    return (reported << 1) | (1 if sleeping > 0 else 0)


@compiled_holding_gil
def _run_short(first: int, function: int, chunks: int, values: Any) -> int:
    """Run everything on the calling thread; what a kernel reported."""
    reported: int = _run_chunks(first, function, chunks, values)
    return reported


@inlined
def report(arguments: int, value: int) -> None:
    """From a kernel: make `Pool.run` return `value`, which is above 0."""
    store_i64(arguments, _REPORT, value)


class Pool:
    """Helper threads beside the thread that calls `run`.

    Any thread may call; while one job runs, a second caller does its own work alone.
    """

    def __init__(self, num_threads: int) -> None:
        self._memory = np.zeros(_SIZE + 64, np.uint8)
        self._state = (self._memory.ctypes.data + 63) // 64 * 64
        _store(self._state + _BALANCE + 8 * _PENALTY, _FEWEST_ALONE)
        self._wake = [threading.Event() for _ in range(num_threads - 1)]
        self._threads = [
            threading.Thread(target=self._serve, args=(event,), name="octavo-kernel", daemon=True)
            for event in self._wake
        ]
        for thread in self._threads:
            _add(self._state + _SLEEPING, 1)
            thread.start()

    @property
    def num_threads(self) -> int:
        """Threads that share a job, the caller included."""
        return len(self._threads) + 1

    def run(self, kernel: Kernel, chunks: int, *arguments: int, first: int = 0) -> int:
        """Run all chunks and return when they are done; `first` is a kernel to run before.

        The result is what a kernel reported, or 0.
        """
        values = arguments + (0,) * (MAX_ARGUMENTS - len(arguments))
        if chunks <= 1:
            return int(_run_short(first, kernel.address, chunks, values))
        result: int = _run_shared(self._state, first, kernel.address, chunks, values)
        if result & 1:
            for event in self._wake:
                event.set()
        return result >> 1

    def close(self) -> None:
        """Stop the helpers; later jobs run on the caller alone."""
        _store(self._state + _STOP, 1)
        for event in self._wake:
            event.set()
        for thread in self._threads:
            thread.join()

    def _serve(self, event: threading.Event) -> None:
        while True:
            event.wait()
            event.clear()
            if _load(self._state + _STOP):
                return
            _help(self._state)


@compiled
def _add(address: int, value: int) -> Any:
    return atomic_add(address, value)


@compiled
def _load(address: int) -> Any:
    return atomic_load(address)


@compiled
def _store(address: int, value: int) -> None:
    atomic_store(address, value)


@cache
def shared_pool() -> Pool:
    """The pool of this process, one thread for each processor it may use."""
    pool = Pool(len(os.sched_getaffinity(0)))
    atexit.register(pool.close)
    return pool
