# ruff: noqa: ANN401  # Numba has no types
"""Fork and join for kernels that last microseconds.

One job at a time is described in shared memory. Threads claim its chunks by one atomic
addition each, so the caller can do all the work itself. Helpers never hold the GIL. After
a job they look for the next one for about a tenth of a millisecond, longer than the pause between
two jobs of a step; then they sleep, so that between steps the processor is free for the
threads that speak HTTP, and whoever shares out a job wakes them.

A thread that the system puts aside holds at most the chunk it is in. A caller that has waited
for it a while sleeps too: the processor that it leaves is where the system can go on with the
other thread. A helper that finds itself on the caller's processor goes to another, before it claims
anything.
"""

import atexit
import os
import threading
import time
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
    keep_alive,
    load_i64,
    read_clock,
    semaphore_init,
    semaphore_post,
    semaphore_wait,
    spin_pause,
    store_i64,
)
from octavo.kernels.cpu.placement import current_processor, leave_processor
from octavo.kernels.cpu.thread_choice import ThreadChoice

MAX_ARGUMENTS = 24
# After the arguments: what a kernel reports by `report`, 0 when all went well.
_REPORT = MAX_ARGUMENTS

# Byte offsets in the shared memory; what different threads write is on different lines.
_DONE = 0  # chunks finished
_OWNER = 64  # 1 while a job runs
_SLEEPING = 128  # helpers that nobody has woken yet
_WAITING = 192  # 1 while the caller sleeps until all chunks are done
_STOP = 256
_JOB = 320  # kernel, the address of its arguments, number of chunks, the caller's processor
_THREADS = 384  # the caller included
_WORK_SEMAPHORE = 448  # helpers sleep here
_DONE_SEMAPHORE = 512  # the caller sleeps here
_ARGUMENTS = 576  # those of a job that is not part of a program
_RANGES = 832  # for each thread: end of its chunks << 32 | next chunk to claim
_LINE = 64

# Words of an instruction of a program: kernel to run first or 0, kernel, chunks, arguments, report.
FIRST, KERNEL, CHUNKS, ARGUMENTS = range(4)
INSTRUCTION_WORDS = ARGUMENTS + MAX_ARGUMENTS + 1

_NEXT_MASK = 0xFFFFFFFF
# Times are in counts of the time stamp counter, about 2.5 in a nanosecond.
_SLEEP_AFTER = 250_000
_WAIT_AWAKE = 50_000


@inlined
def _work_in(state: int, place: int) -> int:
    """Claim and run chunks of the range at `place` until none is left; the number run."""
    count = 0
    while True:
        chunk_range = atomic_load(place)
        if (chunk_range & _NEXT_MASK) >= (chunk_range >> 32):
            return count
        # The job may have changed since the look above: what counts is the claimed chunk,
        # and while that is not done the job stays as it is.
        chunk_range = atomic_add(place, 1)
        chunk = chunk_range & _NEXT_MASK
        if chunk >= (chunk_range >> 32):
            return count
        job = state + _JOB
        call_kernel(load_i64(job, 0), load_i64(job, 1), chunk)
        chunks = load_i64(job, 2)
        done = atomic_add(state + _DONE, 1) + 1
        if done == chunks and atomic_exchange(state + _WAITING, 0) != 0:
            semaphore_post(state + _DONE_SEMAPHORE)
        count += 1


@compiled
def _work(state: int, thread: int) -> int:
    """Run the chunks of this thread, then those that others have not begun; the number run.

    Chunks that follow each other in memory are so run by the same thread, whose kernels fetch
    ahead.
    """
    threads = load_i64(state + _THREADS, 0)
    count = 0
    for offset in range(threads):
        count += _work_in(state, state + _RANGES + _LINE * ((thread + offset) % threads))
    return count


@inlined
def _has_work(state: int) -> bool:
    for thread in range(load_i64(state + _THREADS, 0)):
        chunk_range = atomic_load(state + _RANGES + _LINE * thread)
        if (chunk_range & _NEXT_MASK) < (chunk_range >> 32):
            return True
    return False


@inlined
def _leave_caller(state: int) -> bool:
    """To another processor than the caller's, while no chunk is claimed; False if refused."""
    processor = current_processor()
    if processor < 0 or processor != load_i64(state + _JOB, 3):
        return True
    left: bool = leave_processor(processor)
    return left


@compiled
def _help(state: int, thread: int) -> None:
    """A helper's loop, until the pool is closed."""
    may_leave = True
    while atomic_load(state + _STOP) == 0:
        last = read_clock()
        while read_clock() - last < _SLEEP_AFTER:
            may_leave = may_leave and _leave_caller(state)
            if _work(state, thread) > 0:
                last = read_clock()
            spin_pause()
        atomic_add(state + _SLEEPING, 1)
        # A job shared out before the line above was not announced to this helper. Where one
        # was announced, sleeping ends at once.
        if not _has_work(state) and atomic_load(state + _STOP) == 0:
            semaphore_wait(state + _WORK_SEMAPHORE)
        elif atomic_add(state + _SLEEPING, -1) <= 0:
            atomic_add(state + _SLEEPING, 1)
            semaphore_wait(state + _WORK_SEMAPHORE)


@inlined
def _wake_helpers(state: int) -> None:
    if atomic_load(state + _SLEEPING) > 0:
        for _ in range(atomic_exchange(state + _SLEEPING, 0)):
            semaphore_post(state + _WORK_SEMAPHORE)


@inlined
def _wait(state: int, chunks: int) -> None:
    """Until all chunks are done."""
    begin = read_clock()
    while atomic_load(state + _DONE) < chunks:
        if read_clock() - begin < _WAIT_AWAKE:
            spin_pause()
            continue
        atomic_store(state + _WAITING, 1)
        # Done in between: whoever takes the mark back first decides whether a post follows.
        if atomic_load(state + _DONE) < chunks or atomic_exchange(state + _WAITING, 0) == 0:
            semaphore_wait(state + _DONE_SEMAPHORE)


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
def _run_taken(state: int, first: int, function: int, chunks: int, arguments: int) -> int:
    """Run everything as the owner, with the helpers; what was reported."""
    store_i64(arguments, _REPORT, 0)
    if first != 0:
        call_kernel(first, arguments, 0)
    store_i64(state + _JOB, 0, function)
    store_i64(state + _JOB, 1, arguments)
    store_i64(state + _JOB, 2, chunks)
    store_i64(state + _JOB, 3, current_processor())
    atomic_store(state + _DONE, 0)
    threads = load_i64(state + _THREADS, 0)
    for thread in range(threads):
        begin, end = chunks * thread // threads, chunks * (thread + 1) // threads
        atomic_store(state + _RANGES + _LINE * thread, end << 32 | begin)
    _wake_helpers(state)
    _work(state, 0)
    _wait(state, chunks)
    reported: int = load_i64(arguments, _REPORT)
    return reported


@compiled
def _run_shared(
    state: int, first: int, function: int, chunks: int, values: Any, shares: bool
) -> int:
    """Run `first` once, then all chunks of `function`, with the helpers; what was reported."""
    if not shares or atomic_exchange(state + _OWNER, 1) != 0:
        memory = np.empty(MAX_ARGUMENTS + 1, np.int64)
        for i in range(MAX_ARGUMENTS):
            memory[i] = values[i]
        result: int = _run_alone(first, function, chunks, memory.ctypes.data)
        keep_alive(memory)
        return result
    for i in range(MAX_ARGUMENTS):
        store_i64(state + _ARGUMENTS, i, values[i])
    reported: int = _run_taken(state, first, function, chunks, state + _ARGUMENTS)
    atomic_store(state + _OWNER, 0)
    return reported


@compiled
def _run_program(state: int, code: int, count: int, shares: bool) -> int:
    """Run `count` instructions; the first one that reported, else -1."""
    for number in range(count):
        here = code + 8 * INSTRUCTION_WORDS * number
        first, function = load_i64(here, FIRST), load_i64(here, KERNEL)
        chunks, arguments = load_i64(here, CHUNKS), here + 8 * ARGUMENTS
        if shares and chunks > 1 and atomic_exchange(state + _OWNER, 1) == 0:
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
    keep_alive(memory)
    return reported


@inlined
def report(arguments: int, value: int) -> None:
    """From a kernel: make `Pool.run` return `value`, which is above 0."""
    store_i64(arguments, _REPORT, value)


class Pool:
    """Helper threads beside the thread that calls `run`.

    Any thread may call; while one job runs, a second caller does its own work alone, as all do
    while programs were seen to run faster so. Where a number of threads was asked for, they share.
    """

    def __init__(self, num_threads: int) -> None:
        self._choice = ThreadChoice() if num_threads > 1 else None
        self._shares = True  # as the last program did
        self._threads: list[threading.Thread] = []
        self._start(num_threads)

    def resize(self, num_threads: int) -> None:
        """Use so many threads from now on, always. No job may be running."""
        self.close()
        self._choice = None
        self._start(num_threads)

    def _start(self, num_threads: int) -> None:
        self._memory = np.zeros(_RANGES + _LINE * (num_threads + 1), np.uint8)
        self._state = (self._memory.ctypes.data + _LINE - 1) // _LINE * _LINE
        _prepare(self._state, num_threads)
        self._threads = [
            threading.Thread(target=_help, args=(self._state, i), name="octavo-kernel", daemon=True)
            for i in range(1, num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_threads(self) -> int:
        """Threads that share a job, the caller included."""
        return len(self._threads) + 1

    def run(
        self, kernel: Kernel, chunks: int, *arguments: int, first: int = 0, long: bool = False
    ) -> int:
        """Run all chunks and return when they are done; `first` is a kernel to run before.

        A single chunk keeps the GIL unless it is `long`, more than some microseconds. The result
        is what a kernel reported, or 0.
        """
        values = arguments + (0,) * (MAX_ARGUMENTS - len(arguments))
        if chunks <= 1 and not long:
            return int(_run_short(first, kernel.address, chunks, values))
        shares = self._choice is None or self._shares
        return int(_run_shared(self._state, first, kernel.address, chunks, values, shares))

    def run_program(self, instructions: NDArray[np.int64], num_tokens: int) -> int:
        """Run [n, INSTRUCTION_WORDS] one after the other; the first that reported, else -1.

        Runs of as many instructions and tokens are expected to take about the same time.
        """
        code, count = instructions.ctypes.data, len(instructions)
        if self._choice is None:
            return int(_run_program(self._state, code, count, True))
        size = count, num_tokens
        self._shares = self._choice.shares(size)
        begin = time.perf_counter()
        reported = int(_run_program(self._state, code, count, self._shares))
        self._choice.ended(size, time.perf_counter() - begin)
        return reported

    def close(self) -> None:
        """Stop the helpers; later jobs run on the caller alone."""
        _stop(self._state)
        for thread in self._threads:
            thread.join()
        self._threads = []


@compiled
def _prepare(state: int, num_threads: int) -> None:
    store_i64(state + _THREADS, 0, num_threads)
    semaphore_init(state + _WORK_SEMAPHORE)
    semaphore_init(state + _DONE_SEMAPHORE)


@compiled
def _stop(state: int) -> None:
    atomic_store(state + _STOP, 1)
    # For each, whatever it is about to do: no later job would wake one that was missed.
    for _ in range(load_i64(state + _THREADS, 0)):
        semaphore_post(state + _WORK_SEMAPHORE)


@cache
def shared_pool() -> Pool:
    """The pool of this process, one thread for each processor it may use."""
    pool = Pool(len(os.sched_getaffinity(0)))
    atexit.register(pool.close)
    return pool
