"""Block tables by exact block ids: growth, hits, copy-on-write, fork, release. Block size 4."""

from collections.abc import Callable

import pytest

from octavo.engine.cache.block_table import Allocation
from octavo.engine.cache.kv_cache_manager import KVCacheManager
from octavo.engine.core.request import Sequence

MakeSequence = Callable[..., Sequence]


def manager(num_blocks: int = 8, **options: object) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, **options)  # type: ignore[arg-type]


def compute(cache: KVCacheManager, sequence: Sequence, num_tokens: int) -> Allocation | None:
    """Allocate for the next tokens and play the step that writes them."""
    allocation = cache.allocate_slots(sequence, num_tokens)
    if allocation is not None:
        sequence.advance(num_tokens)
        cache.cache_full_blocks(sequence)
    cache.check_integrity()
    return allocation


def start(cache: KVCacheManager, sequence: Sequence) -> tuple[int, Allocation | None]:
    """Start a sequence with its hits and compute the rest; returns the number of hits."""
    hits = cache.get_computed_blocks(sequence)
    num_tokens = sequence.num_tokens - 4 * len(hits)
    allocation = cache.allocate_slots(sequence, num_tokens, hits)
    if allocation is not None:
        sequence.advance(sequence.num_tokens)
        cache.cache_full_blocks(sequence)
    cache.check_integrity()
    return len(hits), allocation


def decode(cache: KVCacheManager, sequence: Sequence, token_id: int) -> Allocation | None:
    sequence.append_tokens([token_id])
    return compute(cache, sequence, 1)


def test_blocks_come_on_demand(make_sequence: MakeSequence) -> None:
    cache, sequence = manager(), make_sequence([1, 2, 3, 4, 5])
    assert compute(cache, sequence, 3) == Allocation(0, (0,))
    assert compute(cache, sequence, 2) == Allocation(1, (1,))
    for token_id in (6, 7, 8):
        assert decode(cache, sequence, token_id) == Allocation(0, ())
    assert decode(cache, sequence, 9) == Allocation(2, (2,))
    assert cache.block_ids(sequence) == (0, 1, 2)
    assert cache.num_used_blocks == 3


def test_full_pool_is_a_return_value_and_changes_nothing(make_sequence: MakeSequence) -> None:
    cache = manager(num_blocks=2)
    assert compute(cache, make_sequence(list(range(5))), 5) == Allocation(0, (0, 1))
    waiting = make_sequence([7, 8])
    assert cache.allocate_slots(waiting, 2) is None
    cache.check_integrity()
    assert cache.block_ids(waiting) == ()


def test_reserved_blocks_stay_free(make_sequence: MakeSequence) -> None:
    cache = manager(num_blocks=3)
    assert cache.allocate_slots(make_sequence([1]), 1, num_reserved_blocks=3) is None
    assert cache.allocate_slots(make_sequence([1]), 1, num_reserved_blocks=2) is not None


@pytest.mark.parametrize(
    ("length", "num_hits"),
    [(1, 0), (3, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (12, 2), (13, 3)],
)
def test_f03_last_token_is_never_a_hit(
    make_sequence: MakeSequence, length: int, num_hits: int
) -> None:
    cache, prompt = manager(), list(range(length))
    start(cache, make_sequence(prompt))
    assert start(cache, make_sequence(prompt))[0] == num_hits


def test_hits_share_blocks_and_free_ones_are_taken_back(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(num_blocks=4), list(range(9))
    first, second, third = (make_sequence(prompt) for _ in range(3))
    assert start(cache, first) == (0, Allocation(0, (0, 1, 2)))
    assert start(cache, second) == (2, Allocation(2, (3,)))
    assert start(cache, third) == (2, None)
    cache.remove(first)
    cache.remove(second)
    assert cache.num_used_blocks == 0
    assert start(cache, third) == (2, Allocation(2, (3,)))
    assert cache.block_ids(third) == (0, 1, 3)


def test_a_free_hit_counts_as_taken(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(num_blocks=2), list(range(8))
    first = make_sequence(prompt)
    start(cache, first)
    cache.remove(first)
    other = make_sequence([50])
    compute(cache, other, 1)
    assert start(cache, make_sequence(prompt))[1] is None


def test_blocks_made_by_decoding_are_cached_too(make_sequence: MakeSequence) -> None:
    cache, sequence = manager(), make_sequence([1, 2])
    compute(cache, sequence, 2)
    for token_id in (3, 4):
        decode(cache, sequence, token_id)
    assert len(cache.get_computed_blocks(make_sequence([1, 2, 3, 4, 9]))) == 1


def test_a_block_is_cached_only_after_it_was_computed(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(), list(range(8))
    sequence = make_sequence(prompt)
    cache.allocate_slots(sequence, 8)
    assert cache.get_computed_blocks(make_sequence(prompt)) == []
    sequence.advance(7)
    cache.cache_full_blocks(sequence)
    assert len(cache.get_computed_blocks(make_sequence(prompt))) == 1


def test_f05_history_salt_and_every_position_count(make_sequence: MakeSequence) -> None:
    cache = manager(num_blocks=32)
    x, y, z = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    start(cache, make_sequence([*x, *y, 0]))

    def num_hits(token_ids: list[int], salt: str | None = None) -> int:
        return len(cache.get_computed_blocks(make_sequence(token_ids, salt)))

    assert num_hits([*x, *y, 99]) == 2
    assert num_hits([*z, *y, 0]) == 0
    assert num_hits([*y, *x, 0]) == 0
    assert num_hits([*x, *y, 0], "salt") == 0
    assert num_hits([0, 2, 3, 4, *y, 0]) == 0
    assert num_hits([1, 2, 3, 0, *y, 0]) == 0
    start(cache, make_sequence([*x, *y, 0], "salt"))
    assert num_hits([*x, *y, 0], "salt") == 2
    assert num_hits([*x, *y, 0], "other") == 0


def test_f05_colliding_hashes_are_a_miss(make_sequence: MakeSequence) -> None:
    cache = manager(num_blocks=32, hash_function=lambda _: b"same")
    start(cache, make_sequence([1, 2, 3, 4, 5]))
    assert len(cache.get_computed_blocks(make_sequence([1, 2, 3, 4, 9]))) == 1
    assert cache.get_computed_blocks(make_sequence([1, 2, 3, 0, 9])) == []
    assert cache.get_computed_blocks(make_sequence([1, 2, 3, 4, 5], "salt")) == []
    collided = make_sequence([1, 2, 3, 4, 1, 2, 3, 4, 5])
    assert start(cache, collided)[0] == 1
    cache.remove(collided)
    assert len(cache.get_computed_blocks(make_sequence([1, 2, 3, 4, 1, 2, 3, 4, 5]))) == 1


def test_prefix_caching_can_be_off(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(enable_prefix_caching=False), list(range(9))
    start(cache, make_sequence(prompt))
    assert start(cache, make_sequence(prompt)) == (0, Allocation(0, (3, 4, 5)))


def test_fork_shares_all_blocks_and_the_first_writer_copies(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(), [1, 2, 3, 4, 5, 6]
    parent, child = make_sequence(prompt), make_sequence(prompt)
    start(cache, parent)
    cache.fork(parent, child)
    child.advance(6)
    cache.check_integrity()
    assert cache.block_ids(child) == (0, 1)
    assert cache.num_used_blocks == 2
    assert decode(cache, child, 7) == Allocation(1, (2,), ((1, 2),))
    assert decode(cache, parent, 8) == Allocation(0, ())
    assert cache.block_ids(parent) == (0, 1)
    assert cache.block_ids(child) == (0, 2)


def test_fork_at_a_block_border_copies_nothing(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(), [1, 2, 3, 4]
    parent, child = make_sequence(prompt), make_sequence(prompt)
    start(cache, parent)
    cache.fork(parent, child)
    child.advance(4)
    assert decode(cache, parent, 5) == Allocation(1, (1,))
    assert decode(cache, child, 6) == Allocation(1, (2,))


def test_copy_and_growth_come_in_one_allocation(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(), [1, 2]
    parent, child = make_sequence(prompt), make_sequence(prompt)
    start(cache, parent)
    cache.fork(parent, child)
    child.advance(2)
    child.append_tokens([3, 4, 5, 6])
    assert compute(cache, child, 4) == Allocation(0, (1, 2), ((0, 1),))


def test_copy_needs_a_free_block(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(num_blocks=1), [1, 2]
    parent, child = make_sequence(prompt), make_sequence(prompt)
    start(cache, parent)
    cache.fork(parent, child)
    child.advance(2)
    assert decode(cache, child, 3) is None
    cache.remove(parent)
    assert compute(cache, child, 1) == Allocation(0, ())


def test_a_sequence_frees_its_tail_first(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(num_blocks=4), list(range(12))
    sequence = make_sequence(prompt)
    start(cache, sequence)
    cache.remove(sequence)
    compute(cache, make_sequence(list(range(50, 58))), 8)
    assert len(cache.get_computed_blocks(make_sequence(prompt))) == 2


def test_a_preempted_sequence_resumes_from_its_own_blocks(make_sequence: MakeSequence) -> None:
    cache, sequence = manager(), make_sequence(list(range(10)))
    start(cache, sequence)
    sequence.run()
    cache.free(sequence)
    sequence.preempt()
    assert cache.num_used_blocks == 0
    assert start(cache, sequence)[0] == 2


def test_removing_what_was_never_held_does_nothing(make_sequence: MakeSequence) -> None:
    cache = manager()
    cache.remove(make_sequence([1]))
    cache.check_integrity()


def test_reset_needs_an_idle_cache(make_sequence: MakeSequence) -> None:
    cache, prompt = manager(), list(range(9))
    sequence = make_sequence(prompt)
    start(cache, sequence)
    assert not cache.reset_prefix_cache()
    cache.remove(sequence)
    assert cache.reset_prefix_cache()
    assert cache.get_computed_blocks(make_sequence(prompt)) == []
