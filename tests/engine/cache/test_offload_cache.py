"""The second tier: evicted blocks kept in host memory. Block size 4, host ids from 10."""

from collections.abc import Callable

import pytest

from octavo.engine.cache.kv_cache_manager import KVCacheManager
from octavo.engine.core.limits import HostMemory
from octavo.engine.core.request import Sequence

MakeSequence = Callable[..., Sequence]


@pytest.fixture
def cache() -> KVCacheManager:
    return KVCacheManager(3, 4, host_memory=HostMemory(10, 3))


def run(cache: KVCacheManager, sequence: Sequence) -> tuple[int, object]:
    """Compute a sequence and let it go; returns its hits and the copies of its step."""
    hits = cache.get_computed_blocks(sequence)
    num_tokens = sequence.num_tokens - 4 * len(hits)
    assert cache.allocate_slots(sequence, num_tokens, hits) is not None
    copies = cache.take_transfers()
    sequence.advance(sequence.num_tokens)
    cache.cache_full_blocks(sequence)
    cache.check_integrity()
    cache.remove(sequence)
    return len(hits), copies


def test_evicted_blocks_come_back_on_a_hit(
    cache: KVCacheManager, make_sequence: MakeSequence
) -> None:
    prompt, other = list(range(9)), list(range(50, 59))
    assert run(cache, make_sequence(prompt)) == (0, ((), ()))
    # The other prompt takes all three blocks; two of them are worth keeping.
    assert run(cache, make_sequence(other)) == (0, (((1, 10), (0, 11)), ()))
    num_hits, (outs, ins) = run(cache, make_sequence(prompt))  # type: ignore[misc]
    assert num_hits == 2
    assert [source for source, _ in ins] == [11, 10]
    assert cache.num_offload_hits == 2
    # Two more come out; what is kept longest and not part of a copy makes room.
    assert len(outs) == 1


def test_a_block_that_is_kept_already_is_not_copied_again(
    cache: KVCacheManager, make_sequence: MakeSequence
) -> None:
    prompt, other = list(range(5)), list(range(50, 59))
    run(cache, make_sequence(prompt))
    run(cache, make_sequence(other))
    assert run(cache, make_sequence(prompt))[0] == 1
    outs = run(cache, make_sequence(other))[1][0]  # type: ignore[index]
    assert 10 not in [destination for _, destination in outs]


def test_only_equal_history_and_salt_come_back(
    cache: KVCacheManager, make_sequence: MakeSequence
) -> None:
    prompt = list(range(9))
    run(cache, make_sequence(prompt))
    run(cache, make_sequence(list(range(50, 59))))
    assert cache.get_computed_blocks(make_sequence(prompt, "salt")) == []
    assert cache.get_computed_blocks(make_sequence([7, *prompt[1:]])) == []
    assert len(cache.get_computed_blocks(make_sequence(prompt))) == 2


def test_reset_forgets_the_second_tier_too(
    cache: KVCacheManager, make_sequence: MakeSequence
) -> None:
    prompt = list(range(9))
    run(cache, make_sequence(prompt))
    run(cache, make_sequence(list(range(50, 59))))
    assert cache.reset_prefix_cache()
    assert cache.get_computed_blocks(make_sequence(prompt)) == []


def test_colliding_hashes_are_a_miss(make_sequence: MakeSequence) -> None:
    cache = KVCacheManager(2, 4, hash_function=lambda _: b"same", host_memory=HostMemory(0, 4))
    run(cache, make_sequence([1, 2, 3, 4, 5]))
    run(cache, make_sequence([6, 7, 8, 9, 10]))
    assert cache.get_computed_blocks(make_sequence([0, 2, 3, 4, 5])) == []
