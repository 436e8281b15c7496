"""A step that fails in the middle: everything comes back, and the engine can go on."""

from collections.abc import Callable
from typing import Any

import pytest
from engine_harness import Harness, Sizes
from simulated_model import solo_text

from octavo.engine.cache.block_pool import Block, BlockPool
from octavo.engine.cache.kv_cache_manager import KVCacheManager
from octavo.engine.cache.swap_space import SwapSpace
from octavo.engine.core.block_map import BlockOwner
from octavo.engine.core.limits import HostMemory


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + number) % 997 for number in range(length)]


def busy_harness(overlap: bool = False) -> tuple[Harness, set[tuple[str, int]]]:
    """Choices, beams, swapped and offloaded blocks in a cache that is far too small."""
    sizes = Sizes(num_blocks=14, host_memory=HostMemory(40, 20))
    harness = Harness(sizes, overlap=overlap, preemption_mode="swap")
    expected = set()
    for number in range(3):
        harness.add(f"plain{number}", prompt(9 + number, 60 * number), max_tokens=12)
        harness.add(f"n{number}", prompt(13), max_tokens=9, n=3, temperature=1.0, seed=number)
        expected |= {(f"plain{number}", 0), *((f"n{number}", index) for index in range(3))}
    harness.add("beams", prompt(10, 500), max_tokens=8, n=2, best_of=3, use_beam_search=True)
    return harness, expected | {("beams", 0), ("beams", 1)}


class FailingCall:
    """Calls `inner`, and raises at its call number `number` instead."""

    def __init__(self, inner: Callable[..., Any], number: int) -> None:
        self.inner = inner
        self.left = number

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no memory for a table")
        return self.inner(*args)


def run_until_failure(harness: Harness) -> bool:
    while harness.engine.has_work():
        try:
            harness.step()
        except MemoryError:
            return True
    return False


def check_all_is_back(harness: Harness, expected: set[tuple[str, int]]) -> None:
    stats = harness.engine.stats()
    assert (stats.num_used_blocks, stats.num_used_swap_blocks, stats.num_running) == (0, 0, 0)
    assert stats.num_waiting == 0
    owners = {block.owner for block in harness.engine.block_map().blocks}
    assert owners == {BlockOwner.FREE}
    harness.engine.check_integrity()
    # The harness refuses a second terminal delta of a choice.
    harness.run()
    assert harness.choices.keys() == expected
    assert {choice.finish_reason for choice in harness.choices.values()} <= {"length", "error"}
    for name in ("later", "again"):
        params = harness.add(name, prompt(9), max_tokens=5)
        harness.run()
        assert harness.text(name) == solo_text(prompt(9), params)
    assert len(harness.executor.rows) == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("owner", "method", "stride"),
    [(BlockPool, "allocate", 3), (SwapSpace, "take", 2), (KVCacheManager, "fork", 1)],
)
def test_f07_whatever_allocation_fails_everything_comes_back(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, stride: int, overlap: bool
) -> None:
    inner = getattr(owner, method)
    number, failed = 1, True
    while failed:
        harness, expected = busy_harness(overlap)
        failing = FailingCall(inner, number)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, lambda *args, failing=failing: failing(*args))
            failed = run_until_failure(harness)
        if failed:
            check_all_is_back(harness, expected)
        number += stride
    assert number > 5 * stride, "it is not called often enough to mean anything"


def test_f08_a_failing_executor_leaves_nothing_held() -> None:
    harness, expected = busy_harness()
    for _ in range(12):
        harness.step()
    assert harness.engine.stats().num_used_swap_blocks > 0
    harness.executor.error = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="gone"):
        harness.step()
    stats = harness.engine.stats()
    assert (stats.num_used_blocks, stats.num_used_swap_blocks, stats.num_running) == (0, 0, 0)
    harness.run()
    assert harness.choices.keys() == expected


def test_a_contradiction_is_counted_not_raised() -> None:
    harness = Harness()
    harness.engine.verify()
    assert harness.engine.stats().num_integrity_errors == 0
    pool = harness.engine._kv_cache._pool
    lost: Block = pool.allocate(1)[0]
    harness.engine.verify()
    assert harness.engine.stats().num_integrity_errors == 1
    pool.release(lost)
    harness.engine.verify()
    assert harness.engine.stats().num_integrity_errors == 1
