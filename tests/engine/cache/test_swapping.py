"""Blocks that go to host memory and come back, by exact block ids. Block size 4."""

from collections.abc import Callable

import pytest

from octavo.engine.cache.kv_cache_manager import KVCacheManager
from octavo.engine.core.limits import HostMemory
from octavo.engine.core.request import Sequence

MakeSequence = Callable[..., Sequence]


def manager(num_blocks: int = 8, num_swap_blocks: int = 8, **options: object) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, host_memory=HostMemory(num_swap_blocks), **options)  # type: ignore[arg-type]


def start(cache: KVCacheManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    """Compute all known tokens, or the first ones."""
    count = sequence.num_tokens if num_tokens is None else num_tokens
    assert cache.allocate_slots(sequence, count) is not None
    sequence.advance(count)
    cache.cache_full_blocks(sequence)


def fork(cache: KVCacheManager, parent: Sequence, child: Sequence) -> Sequence:
    cache.fork(parent, child)
    child.advance(parent.num_computed_tokens)
    return child


@pytest.mark.parametrize("caching", [True, False])
def test_computed_blocks_go_out_and_come_back(make_sequence: MakeSequence, caching: bool) -> None:
    cache = manager(enable_prefix_caching=caching)
    sequence = make_sequence(list(range(6)))
    start(cache, sequence)
    assert cache.swap_out([sequence], {})
    assert cache.take_transfers() == (((0, 0), (1, 1)), ())
    assert (cache.num_used_blocks, cache.swap_space.num_used_blocks) == (0, 2)
    cache.check_integrity()
    start(cache, make_sequence(list(range(50, 82))))  # takes every block
    assert cache.num_free_blocks == 0
    cache.check_integrity()


def test_blocks_that_were_taken_meanwhile_are_copied_back(make_sequence: MakeSequence) -> None:
    cache = manager(num_blocks=4)
    sequence, other = make_sequence(list(range(6))), make_sequence(list(range(50, 66)))
    start(cache, sequence)
    cache.swap_out([sequence], {})
    start(cache, other)
    cache.remove(other)
    cache.take_transfers()
    assert cache.num_swap_in_blocks([sequence]) == 2
    cache.swap_in([sequence])
    outs, ins = cache.take_transfers()
    assert (outs, [source for source, _ in ins]) == ((), [0, 1])
    assert cache.block_ids(sequence) == tuple(block_id for _, block_id in ins)
    assert cache.swap_space.num_used_blocks == 0
    cache.check_integrity()


def test_blocks_that_are_still_there_are_taken_as_they_are(make_sequence: MakeSequence) -> None:
    cache = manager()
    sequence = make_sequence(list(range(10)))
    start(cache, sequence)
    cache.swap_out([sequence], {})
    cache.take_transfers()
    cache.swap_in([sequence])
    # The third one is not full: it could have been written since, so it is copied.
    outs, ins = cache.take_transfers()
    assert outs == () and [source for source, _ in ins] == [2]
    assert cache.block_ids(sequence)[:2] == (0, 1)
    cache.check_integrity()


def test_shared_blocks_are_copied_once_in_a_group(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(), list(range(6))
    parent = make_sequence(prompt)
    start(cache, parent)
    group = [parent, *(fork(cache, parent, make_sequence(prompt)) for _ in range(2))]
    assert cache.num_blocks_to_save(group) == 2
    assert cache.swap_out(group, {})
    assert cache.take_transfers() == (((0, 0), (1, 1)), ())
    for sequence in group:
        sequence.append_tokens([7])
    # One block of the prompt, and one for each to write.
    assert cache.num_swap_in_blocks(group) == 1 + 3
    cache.swap_in(group)
    assert len({cache.block_ids(sequence) for sequence in group}) == 1
    cache.take_transfers()
    cache.check_integrity()


def test_full_blocks_are_copied_once_however_their_holders_leave(
    make_sequence: MakeSequence,
) -> None:
    cache, prompt = manager(), list(range(9))
    parent = make_sequence(prompt)
    start(cache, parent)
    child = fork(cache, parent, make_sequence(prompt))
    cache.swap_out([child], {})
    assert cache.take_transfers() == (((0, 0), (1, 1), (2, 2)), ())
    cache.swap_out([parent], {})
    assert cache.take_transfers() == (((2, 3),), ())
    cache.check_integrity()
    cache.swap_in([child])
    cache.remove(parent)
    cache.take_transfers()
    assert cache.swap_space.num_used_blocks == 0
    cache.check_integrity()


def test_no_room_changes_nothing(make_sequence: MakeSequence) -> None:
    cache = manager(num_swap_blocks=1)
    sequence = make_sequence(list(range(6)))
    start(cache, sequence)
    assert not cache.swap_out([sequence], {})
    assert cache.take_transfers() == ((), ())
    assert cache.block_ids(sequence) == (0, 1)
    cache.check_integrity()


def test_a_copy_that_will_not_be_done_is_saved_from_its_source(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(), list(range(6))
    parent = make_sequence(prompt)
    start(cache, parent)
    child = fork(cache, parent, make_sequence(prompt))
    child.append_tokens([7])
    allocation = cache.allocate_slots(child, 1)
    assert allocation is not None and allocation.block_copies == ((1, 2),)
    cache.swap_out([child], {2: 1})
    assert cache.take_transfers() == (((0, 0), (1, 1)), ())
    cache.check_integrity()


def test_what_waits_in_host_memory_can_be_dropped(make_sequence: MakeSequence) -> None:
    cache = manager()
    sequence = make_sequence(list(range(6)))
    start(cache, sequence)
    cache.swap_out([sequence], {})
    cache.take_transfers()
    cache.remove(sequence)
    assert cache.swap_space.num_used_blocks == 0
    cache.check_integrity()
