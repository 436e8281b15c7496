"""The fork-join pool: every chunk runs exactly once, whoever calls."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from octavo.kernels.cpu.compiled import Kernel
from octavo.kernels.cpu.intrinsics import atomic_add, atomic_load, load_i64, read_clock
from octavo.kernels.cpu.pool import (
    ARGUMENTS,
    CHUNKS,
    INSTRUCTION_WORDS,
    KERNEL,
    Pool,
    report,
)


def _count_kernel(a: int, chunk: int) -> None:
    atomic_add(load_i64(a, 0) + 8 * (chunk + load_i64(a, 1)), 1)


def _report_kernel(a: int, chunk: int) -> None:
    if chunk == 3:
        report(a, 5)


_count = Kernel(_count_kernel)
_report = Kernel(_report_kernel)


@pytest.fixture(params=[1, 2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(request.param)
    yield pool
    pool.close()


def test_each_chunk_runs_once(pool: Pool) -> None:
    counts = np.zeros(1000, np.int64)
    for chunks in (1, 2, 3, 999, 1000):
        for _ in range(50):
            pool.run(_count, chunks, counts.ctypes.data)
        assert (counts[:chunks] == 50).all()
        assert (counts[chunks:] == 0).all()
        counts[:] = 0


def test_callers_at_the_same_time_do_not_mix_their_jobs(pool: Pool) -> None:
    counts = np.zeros((4, 64), np.int64)

    def call(row: int) -> None:
        for _ in range(200):
            pool.run(_count, 64, counts[row].ctypes.data, 0)

    callers = [threading.Thread(target=call, args=(row,)) for row in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert (counts == 200).all()


def test_the_first_kernel_runs_once_before_the_chunks(pool: Pool) -> None:
    counts = np.zeros(10, np.int64)
    pool.run(_count, 4, counts.ctypes.data, 2, first=_count.address)
    assert counts.tolist() == [0, 0, 2, 1, 1, 1, 0, 0, 0, 0]


def test_a_report_reaches_the_caller_and_is_forgotten(pool: Pool) -> None:
    assert pool.run(_report, 8) == 5
    assert pool.run(_report, 3) == 0


def test_closed_pool_still_does_the_work() -> None:
    pool = Pool(2)
    pool.close()
    counts = np.zeros(6, np.int64)
    pool.run(_count, 6, counts.ctypes.data)
    assert (counts == 1).all()


def test_another_number_of_threads() -> None:
    pool = Pool(1)
    counts = np.zeros(50, np.int64)
    for num_threads in (3, 1, 2):
        pool.resize(num_threads)
        assert pool.num_threads == num_threads
        pool.run(_count, 50, counts.ctypes.data)
    pool.close()
    assert (counts == 3).all()


def test_a_program_stops_where_a_kernel_reports(pool: Pool) -> None:
    counts = np.zeros(10, np.int64)
    code = np.zeros((4, INSTRUCTION_WORDS), np.int64)
    code[:, KERNEL], code[:, CHUNKS] = _count.address, [10, 0, 10, 10]
    code[:, ARGUMENTS] = counts.ctypes.data
    assert pool.run_program(code, 1) == -1
    assert (counts == 3).all()
    code[2, KERNEL] = _report.address
    assert pool.run_program(code, 1) == 2
    assert (counts == 4).all()


def _meeting_kernel(a: int, chunk: int) -> None:
    """Wait until as many threads as there are chunks are here; some seconds at most."""
    here = load_i64(a, 0)
    atomic_add(here, 1)
    begin = read_clock()
    while atomic_load(here) < load_i64(a, 1) and read_clock() - begin < 20_000_000_000:
        pass
    if atomic_load(here) < load_i64(a, 1):
        report(a, 1)


def _late_kernel(a: int, chunk: int) -> None:
    """Later chunks take longer."""
    begin = read_clock()
    while read_clock() - begin < chunk * 10_000_000:
        pass
    atomic_add(load_i64(a, 0), 1)


_meeting = Kernel(_meeting_kernel)
_late = Kernel(_late_kernel)


def test_helpers_that_sleep_are_woken() -> None:
    pool = Pool(3)
    for _ in range(3):
        time.sleep(0.02)
        count = np.zeros(1, np.int64)
        assert pool.run(_meeting, 3, count.ctypes.data, 3) == 0
    pool.close()


def test_a_caller_that_sleeps_is_woken_by_the_last_chunk(pool: Pool) -> None:
    count = np.zeros(1, np.int64)
    for done in range(1, 6):
        pool.run(_late, 4, count.ctypes.data)
        assert count[0] == 4 * done


def _first_waits_kernel(a: int, chunk: int) -> None:
    here = load_i64(a, 0)
    begin = read_clock()
    while chunk == 0 and atomic_load(here) < 39 and read_clock() - begin < 20_000_000_000:
        pass
    if chunk == 0 and atomic_load(here) < 39:
        report(a, 1)
    atomic_add(here, 1)


_first_waits = Kernel(_first_waits_kernel)


def test_a_thread_runs_chunks_that_another_has_not_begun() -> None:
    pool = Pool(2)
    count = np.zeros(1, np.int64)
    # The first chunk of the caller waits until all others are done.
    assert pool.run(_first_waits, 40, count.ctypes.data) == 0
    pool.close()


def test_jobs_with_pauses_between_them(pool: Pool) -> None:
    counts = np.zeros(8, np.int64)
    for pause in (0, 50, 100, 200, 400) * 40:
        end = time.perf_counter_ns() + 1000 * pause
        while time.perf_counter_ns() < end:
            pass
        pool.run(_count, 8, counts.ctypes.data)
    assert (counts == 200).all()


def test_a_long_chunk_leaves_the_gil_to_other_threads() -> None:
    pool = Pool(1)
    count = np.zeros(1, np.int64)
    other = threading.Thread(target=lambda: pool.run(_meeting, 1, count.ctypes.data, 2, long=True))
    other.start()
    while count[0] == 0:
        time.sleep(0.001)
    count[0] = 2  # held back by the GIL, this would come after the kernel gave up
    other.join(timeout=2)
    assert not other.is_alive()


def test_pools_that_have_just_worked_can_be_closed() -> None:
    counts = np.zeros(8, np.int64)
    for _ in range(50):
        pool = Pool(4)
        pool.run(_count, 8, counts.ctypes.data)
        time.sleep(0.0001)
        pool.close()
    assert (counts == 50).all()
