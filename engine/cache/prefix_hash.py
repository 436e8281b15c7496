"""Identity of a full block: its tokens after exactly its history.

hash = SHA-256(hash of the parent block || token ids as int32). The chain starts from the extra
keys (`cache_salt`), so they are part of every hash. The precision of the cache, which is the same
for all blocks, is part of the function. What else changes K and V (an adapter) would join the
extra keys.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from hashlib import sha256
from typing import NamedTuple

HashFunction = Callable[[bytes], bytes]


def sha256_hash(data: bytes) -> bytes:
    """SHA-256 digest, 32 bytes."""
    return sha256(data).digest()


def hash_function_for(kv_cache_dtype: str) -> HashFunction:
    """The function for a cache of this `--kv-cache-dtype`: equal tokens get different hashes."""
    if kv_cache_dtype == "auto":
        return sha256_hash
    begun = sha256(kv_cache_dtype.encode())

    def digest(data: bytes) -> bytes:
        state = begun.copy()
        state.update(data)
        return state.digest()

    return digest


class BlockKey(NamedTuple):
    """Where to look for a block (`block_hash`) and what it must contain (`token_bytes`, int32)."""

    block_hash: bytes
    token_bytes: bytes


class PrefixNode:
    """The content of a block in full: its tokens and, through `parent`, all tokens before.

    The root of a chain has no parent. A node outlives its block while a later block of the chain
    is still cached.
    """

    __slots__ = ("block_hash", "parent", "token_bytes")

    def __init__(self, key: BlockKey, parent: "PrefixNode | None") -> None:
        self.block_hash = key.block_hash
        self.token_bytes = key.token_bytes
        self.parent = parent

    def matches(self, token_bytes: bytes, parent: "PrefixNode") -> bool:
        """True when this is the content `token_bytes` after `parent`, whatever the hashes say."""
        return self.token_bytes == token_bytes and _same_history(self.parent, parent)


def _same_history(left: PrefixNode | None, right: PrefixNode | None) -> bool:
    # Chains of one prefix share their nodes, so this ends at the first or second pair but for
    # the rare case of a parent that was evicted and computed again.
    while left is not right:
        if left is None or right is None or left.token_bytes != right.token_bytes:
            return False
        left, right = left.parent, right.parent
    return True


def root_node(cache_salt: str | None, hash_function: HashFunction) -> PrefixNode:
    """The start of a chain, which stands for the extra keys; without any its hash is empty."""
    if cache_salt is None:
        return PrefixNode(BlockKey(b"", b""), None)
    extra_keys = cache_salt.encode("utf-8", "surrogatepass")
    return PrefixNode(BlockKey(hash_function(extra_keys), extra_keys), None)


def block_key(
    parent_hash: bytes, token_ids: SequenceOf[int], hash_function: HashFunction
) -> BlockKey:
    """Key of the full block `token_ids` after the block with `parent_hash` or root."""
    token_bytes = array("i", token_ids).tobytes()
    return BlockKey(hash_function(parent_hash + token_bytes), token_bytes)
