"""The fork-join pool: every chunk runs exactly once, whoever calls."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from octavo.kernels.cpu.compiled import Kernel
from octavo.kernels.cpu.intrinsics import atomic_add, load_i64
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
    assert pool.run_program(code) == -1
    assert (counts == 3).all()
    code[2, KERNEL] = _report.address
    assert pool.run_program(code) == 2
    assert (counts == 4).all()
