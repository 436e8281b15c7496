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
from numpy.typing import NDArray

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

MAX_ARGUMENTS = 24
# After the arguments: what a kernel reports by `report`, 0 when all went well.
_REPORT = MAX_ARGUMENTS

# Byte offsets in the shared memory; what different threads write is on different lines.
_TICKET = 0  # number of chunks << 32 | next chunk to claim
_DONE = 64  # chunks finished
_OWNER = 128  # 1 while a job runs
_SLEEPING = 192  # helpers that must be woken
_STOP = 256
_BALANCE = 320  # see `learn`
_FUNCTION = 384  # then the address of the job's arguments
_ARGUMENTS = 448  # those of a job that is not part of a program
_SIZE = _ARGUMENTS + 8 * (MAX_ARGUMENTS + 1)

# Words of an instruction of a program: kernel to run first or 0, kernel, chunks, arguments, report.
FIRST, KERNEL, CHUNKS, ARGUMENTS = range(4)
INSTRUCTION_WORDS = ARGUMENTS + MAX_ARGUMENTS + 1

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
        job = state + _FUNCTION
        call_kernel(load_i64(job, 0), load_i64(job, 1), chunk)
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


_ALONE, _PENALTY, _WON, _JOBS, _FIXED = range(5)


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
def _run_alone(first: int, function: int, chunks: int, arguments: int) -> int:
    """Run everything on the calling thread; what a kernel reported."""
    store_i64(arguments, _REPORT, 0)
    if first != 0:
        call_kernel(first, arguments, 0)
    for chunk in range(chunks):
        call_kernel(function, arguments, chunk)
    reported: int = load_i64(arguments, _REPORT)
    return reported


@inlined
def _take(state: int) -> bool:
    """Become the owner of the shared memory, unless there is one or helpers do not pay now."""
    if atomic_exchange(state + _OWNER, 1) != 0:
        return False
    alone = load_i64(state + _BALANCE, _ALONE)
    if alone == 0:
        return True
    store_i64(state + _BALANCE, _ALONE, alone - 1)
    atomic_store(state + _OWNER, 0)
    return False


@inlined
def _run_taken(state: int, first: int, function: int, chunks: int, arguments: int) -> int:
    """Run everything as the owner, with the helpers where they are free; what was reported."""
    store_i64(arguments, _REPORT, 0)
    if first != 0:
        call_kernel(first, arguments, 0)
    store_i64(state + _FUNCTION, 0, function)
    store_i64(state + _FUNCTION, 1, arguments)
    atomic_store(state + _DONE, 0)
    atomic_store(state + _TICKET, chunks << 32)
    begin = read_clock()
    own = _work(state)
    finished = read_clock()
    while atomic_load(state + _DONE) < chunks:
        spin_pause()
        if read_clock() - finished > _YIELD_AFTER:
            yield_processor()
    if load_i64(state + _BALANCE, _FIXED) == 0:
        learn(state + _BALANCE, own, chunks, finished - begin, read_clock() - finished)
    reported: int = load_i64(arguments, _REPORT)
    return reported


@compiled
def _run_shared(state: int, first: int, function: int, chunks: int, values: Any) -> int:
    """Run `first` once, then all chunks of `function`, with the helpers where they are free.

    Bit 0 of the result: some helper sleeps. The others: what a kernel reported.
    """
    if not _take(state):
        memory = np.empty(MAX_ARGUMENTS + 1, np.int64)
        for i in range(MAX_ARGUMENTS):
            memory[i] = values[i]
        result: int = _run_alone(first, function, chunks, memory.ctypes.data)
        return result << 1
    for i in range(MAX_ARGUMENTS):
        store_i64(state + _ARGUMENTS, i, values[i])
    sleeping = atomic_load(state + _SLEEPING)
    reported: int = _run_taken(state, first, function, chunks, state + _ARGUMENTS)
    atomic_store(state + _OWNER, 0)
    return (reported << 1) | (1 if sleeping > 0 else 0)


@compiled
def _run_program(state: int, code: int, count: int) -> int:
    """Run `count` instructions; the first one that reported, else -1.

    Helpers can be woken only before: where one has gone to sleep the caller works alone.
    """
    for number in range(count):
        here = code + 8 * INSTRUCTION_WORDS * number
        first, function = load_i64(here, FIRST), load_i64(here, KERNEL)
        chunks, arguments = load_i64(here, CHUNKS), here + 8 * ARGUMENTS
        if chunks > 1 and _take(state):
            reported = _run_taken(state, first, function, chunks, arguments)
            atomic_store(state + _OWNER, 0)
        else:
            reported = _run_alone(first, function, chunks, arguments)
        if reported != 0:
            return number
    return -1


@compiled_holding_gil
def _run_short(first: int, function: int, chunks: int, values: Any) -> int:
    """Run everything on the calling thread; what a kernel reported."""
    memory = np.empty(MAX_ARGUMENTS + 1, np.int64)
    for i in range(MAX_ARGUMENTS):
        memory[i] = values[i]
    reported: int = _run_alone(first, function, chunks, memory.ctypes.data)
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
        self._wake: list[threading.Event] = []
        self._threads: list[threading.Thread] = []
        self._start(num_threads)

    def resize(self, num_threads: int) -> None:
        """Use so many threads from now on, also where other programs make that slower.

        No job may be running.
        """
        self.close()
        _store(self._state + _STOP, 0)
        _store(self._state + _BALANCE + 8 * _ALONE, 0)
        _store(self._state + _BALANCE + 8 * _FIXED, 1)
        self._start(num_threads)

    def _start(self, num_threads: int) -> None:
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
            self._wake_helpers()
        return result >> 1

    def run_program(self, instructions: NDArray[np.int64]) -> int:
        """Run [n, INSTRUCTION_WORDS] one after the other; the first that reported, else -1."""
        if _wants_helpers(self._state):
            self._wake_helpers()
        return int(_run_program(self._state, instructions.ctypes.data, len(instructions)))

    def _wake_helpers(self) -> None:
        for event in self._wake:
            event.set()

    def close(self) -> None:
        """Stop the helpers; later jobs run on the caller alone."""
        _store(self._state + _STOP, 1)
        self._wake_helpers()
        for thread in self._threads:
            thread.join()

    def _serve(self, event: threading.Event) -> None:
        while True:
            event.wait()
            event.clear()
            if _load(self._state + _STOP):
                _add(self._state + _SLEEPING, -1)
                return
            _help(self._state)


@compiled_holding_gil
def _wants_helpers(state: int) -> bool:
    """Whether some helper sleeps that would be used soon."""
    sleeping = atomic_load(state + _SLEEPING) > 0
    return bool(sleeping and load_i64(state + _BALANCE, _ALONE) < _FEWEST_ALONE)


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
