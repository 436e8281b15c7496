"""What identifies a block: the bytes that are hashed, and the comparison behind the hash."""

from hashlib import sha256
from struct import pack

from octavo.engine.cache.prefix_hash import (
    BlockKey,
    PrefixNode,
    block_key,
    hash_function_for,
    root_node,
    sha256_hash,
)


def test_f05_hash_is_sha256_over_parent_hash_and_int32_tokens() -> None:
    first = block_key(b"", [1, 2, 70000], sha256_hash)
    assert first.block_hash == sha256(pack("<3i", 1, 2, 70000)).digest()
    second = block_key(first.block_hash, [3], sha256_hash)
    assert second.block_hash == sha256(first.block_hash + pack("<i", 3)).digest()


def test_f05_salt_is_part_of_the_chain() -> None:
    roots = {root_node(salt, sha256_hash).block_hash for salt in (None, "a", "b")}
    assert len(roots) == 3


def test_f05_the_precision_of_the_cache_is_part_of_every_hash() -> None:
    plain, fp8 = hash_function_for("auto"), hash_function_for("fp8")
    assert plain(b"x") == sha256_hash(b"x") == plain(b"x")
    assert len({plain(b"x"), plain(b"y"), fp8(b"x"), fp8(b"y")}) == 4
    assert fp8(b"x") == hash_function_for("fp8")(b"x")


def test_f05_content_is_compared_through_the_whole_history() -> None:
    def chain(*contents: bytes) -> PrefixNode:
        node = PrefixNode(BlockKey(b"", b""), None)
        for content in contents:
            node = PrefixNode(BlockKey(b"same", content), node)
        return node

    node = chain(b"a", b"b", b"c")
    assert node.matches(b"c", chain(b"a", b"b"))
    assert not node.matches(b"x", chain(b"a", b"b"))
    assert not node.matches(b"c", chain(b"x", b"b"))
    assert not node.matches(b"c", chain(b"b"))
