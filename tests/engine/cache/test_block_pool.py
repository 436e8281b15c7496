"""The pool alone: order of the free list, hits, eviction, and what it refuses."""

import pytest

from octavo.engine.cache.block_pool import Block, BlockPool
from octavo.engine.cache.prefix_hash import BlockKey, PrefixNode, block_key, root_node, sha256_hash

ROOT = root_node(None, sha256_hash)


def key_of(*token_ids: int, parent: PrefixNode = ROOT) -> BlockKey:
    return block_key(parent.block_hash, token_ids, sha256_hash)


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_blocks_are_handed_out_in_order_and_uncached_ones_are_reused_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert ids([first, second]) == [0, 1]
    pool.release(first)
    assert ids(pool.allocate(2)) == [0, 2]
    assert pool.num_free_blocks == 1


def test_cached_blocks_are_reused_last_and_in_order_of_their_release() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.register(first, key_of(1, 2), ROOT)
    pool.register(second, key_of(3, 4), ROOT)
    pool.release(second)
    pool.release(first)
    assert ids(pool.allocate(3)) == [2, 3, 1]
    assert pool.lookup(key_of(3, 4), ROOT) is None
    assert pool.lookup(key_of(1, 2), ROOT) is first


def test_a_hit_takes_a_free_block_out_of_the_middle_of_the_list() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        pool.register(block, key_of(number), ROOT)
        pool.release(block)
    hit = pool.lookup(key_of(1), ROOT)
    assert hit is blocks[1]
    pool.share(hit)
    assert ids(pool.allocate(2)) == [0, 2]
    pool.check_integrity({0: 1, 1: 1, 2: 1})


def test_a_shared_block_stays_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release(block)
    assert pool.num_free_blocks == 0
    pool.release(block)
    assert pool.num_free_blocks == 1


def test_a_second_release_is_an_impossible_state() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.release(block)
    with pytest.raises(AssertionError):
        pool.release(block)


def test_the_first_block_of_a_content_keeps_its_place() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    node = pool.register(first, key_of(1), ROOT)
    assert pool.register(second, key_of(1), ROOT) is node
    assert second.node is None
    assert pool.lookup(key_of(1), ROOT) is first


def test_all_content_is_forgotten_only_while_no_block_is_held() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, key_of(1), ROOT)
    assert not pool.forget_all()
    pool.release(block)
    assert pool.forget_all()
    assert pool.lookup(key_of(1), ROOT) is None
    pool.check_integrity({})


def test_a_child_of_an_evicted_parent_is_found_again_after_the_parent_is_recomputed() -> None:
    pool = BlockPool(3)
    parent, child = pool.allocate(2)
    parent_node = pool.register(parent, key_of(1), ROOT)
    child_key = key_of(2, parent=parent_node)
    pool.register(child, child_key, parent_node)
    pool.release(parent)
    assert ids(pool.allocate(2)) == [2, 0]
    renewed = pool.register(parent, key_of(1), ROOT)
    assert renewed is not parent_node
    assert pool.lookup(child_key, renewed) is child


def test_integrity_check_sees_a_wrong_reference_count() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check_integrity({})
