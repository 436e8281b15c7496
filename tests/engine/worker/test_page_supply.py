"""Pages of the cache that the system gives before they are needed."""

import mmap
import platform
import sys

import pytest
import torch

from octavo.engine.worker.page_supply import PageSupply

_PAGE = 4096


def _resident_bytes() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("Rss:"))


def _can_be_asked() -> bool:
    if sys.platform != "linux":
        return False
    version = tuple(int(part) for part in platform.release().split(".")[:2])
    return version >= (5, 14)


@pytest.mark.skipif(not _can_be_asked(), reason="Linux gives pages when asked from 5.14 on")
def test_the_first_blocks_get_their_pages_and_keep_their_contents() -> None:
    memory = [mmap.mmap(-1, 4096 * 4096) for _ in range(2)]
    tensors = [torch.frombuffer(area, dtype=torch.uint8).view(4096, 4096) for area in memory]
    supply = PageSupply(tensors, 1024)
    before = _resident_bytes()
    tensors[0][3, 5] = 7
    while supply.supply():
        pass
    gained = _resident_bytes() - before
    assert 2 * 1024 * _PAGE * 0.9 < gained < 2 * 2048 * _PAGE
    assert tensors[0][3, 5] == 7
    assert not tensors[1].any()
    assert not supply.supply()
