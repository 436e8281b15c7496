"""How long something takes on a device."""

import time
from collections.abc import Callable

import torch


def best_seconds(
    work: Callable[[], object], device: torch.device, repetitions: int, calls: int = 1
) -> float:
    """Seconds of `work`, the shortest of several runs; one more before them is not counted.

    A run is so many calls in a row, over which a GPU's launches overlap.
    """
    seconds = _seconds_on_gpu if device.type == "cuda" else _seconds_on_cpu
    return min([seconds(work, calls) for _ in range(repetitions + 1)][1:])


def _seconds_on_cpu(work: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) / calls


def _seconds_on_gpu(work: Callable[[], object], calls: int) -> float:
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls
