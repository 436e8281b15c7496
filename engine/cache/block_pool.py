"""All blocks of the KV cache: reference counts, the free list and the map of cached blocks."""

from collections.abc import Callable, Mapping

from octavo.engine.cache.prefix_hash import BlockKey, PrefixNode


class HostBlock:
    """A block in host memory. `ref_count` is the number of saved tables that hold it; `twin` is a
    block of the cache with the same content. Only SwapSpace changes it.
    """

    __slots__ = ("block_id", "ref_count", "twin")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.twin: Block | None = None


class Block:
    """One block. `ref_count` is the number of tables that hold it; `node` is its content while
    it is cached for reuse, `twin` a copy in host memory. Only BlockPool and SwapSpace change it.
    """

    __slots__ = ("block_id", "next_free", "node", "prev_free", "ref_count", "twin")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.node: PrefixNode | None = None
        self.twin: HostBlock | None = None
        self.prev_free: Block = self
        self.next_free: Block = self


class FreeBlockList:
    """Free blocks in the order in which they will be taken. Every operation is O(1).

    A ring around one sentinel, so that no end needs a case of its own.
    """

    def __init__(self) -> None:
        self._ring = Block(-1)
        self.count = 0

    def push_last(self, block: Block) -> None:
        """Make `block` the last one to be taken."""
        self._insert(block, self._ring.prev_free)

    def push_first(self, block: Block) -> None:
        """Make `block` the next one to be taken."""
        self._insert(block, self._ring)

    def pop_first(self) -> Block:
        """Take the block at the head; the list must not be empty."""
        block = self._ring.next_free
        assert block is not self._ring, "no free block"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Take `block`, wherever it stands."""
        block.prev_free.next_free = block.next_free
        block.next_free.prev_free = block.prev_free
        block.prev_free = block.next_free = block
        self.count -= 1

    def blocks(self) -> list[Block]:
        """All free blocks, head first; for checks."""
        result = []
        block = self._ring.next_free
        while block is not self._ring:
            result.append(block)
            block = block.next_free
        return result

    def _insert(self, block: Block, before: Block) -> None:
        after = before.next_free
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self.count += 1


class BlockPool:
    """Hands out blocks and takes them back.

    A cached block whose last holder has gone waits at the tail of the free list and can be taken
    out again by a hit; it loses its content when it comes to the head and is allocated. A block
    without reusable content goes to the head, so that it never costs a cached one its place.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[Block, PrefixNode], None] | None = None
    ) -> None:
        """`on_evict` is told of each cached block that is about to be taken for new content."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlockList()
        for block in self._blocks:
            self._free.push_last(block)
        self._cached: dict[bytes, Block] = {}

    def block(self, block_id: int) -> Block:
        """The block with an id."""
        return self._blocks[block_id]

    def blocks(self) -> list[Block]:
        """All blocks, by id."""
        return self._blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds, cached ones included."""
        return self._free.count

    def allocate(self, count: int) -> list[Block]:
        """Take `count` free blocks for new content; there must be as many."""
        blocks = [self._free.pop_first() for _ in range(count)]
        for block in blocks:
            if block.node is not None:
                if self._on_evict is not None:
                    self._on_evict(block, block.node)
                self._forget(block)
            if block.twin is not None:
                block.twin.twin = None
                block.twin = None
            block.ref_count = 1
        return blocks

    def share(self, block: Block) -> None:
        """Add one holder; a free cached block leaves the free list."""
        if block.ref_count == 0:
            self._free.remove(block)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Drop one holder; without any the block is free."""
        assert block.ref_count > 0, block.block_id
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.node is None:
                self._free.push_first(block)
            else:
                self._free.push_last(block)

    def lookup(self, key: BlockKey, parent: PrefixNode) -> Block | None:
        """The cached block with this content after `parent`; equal hashes alone do not count."""
        block = self._cached.get(key.block_hash)
        if block is None or block.node is None:
            return None
        return block if block.node.matches(key.token_bytes, parent) else None

    def register(self, block: Block, key: BlockKey, parent: PrefixNode) -> PrefixNode:
        """Offer a full, written block for reuse and return the node of its content.

        The first block with a hash keeps its place, be it the same content or a collision;
        `block` is then not cached.
        """
        assert block.node is None and block.ref_count > 0, block.block_id
        known = self._cached.get(key.block_hash)
        if known is not None and known.node is not None:
            if known.node.matches(key.token_bytes, parent):
                return known.node
            return PrefixNode(key, parent)
        node = PrefixNode(key, parent)
        block.node = node
        self._cached[key.block_hash] = block
        return node

    def forget_all(self) -> bool:
        """Drop all cached content. Refused (False) while any block is held."""
        if self.num_free_blocks != self.num_blocks:
            return False
        for block in list(self._cached.values()):
            self._forget(block)
        return True

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Assert that the state is consistent; `holders` counts the tables per block id."""
        free = self._free.blocks()
        free_ids = {block.block_id for block in free}
        assert len(free_ids) == len(free) == self._free.count
        for block in self._blocks:
            assert block.ref_count == holders.get(block.block_id, 0), block.block_id
            assert (block.ref_count == 0) == (block.block_id in free_ids), block.block_id
            if block.node is not None:
                assert self._cached.get(block.node.block_hash) is block, block.block_id
            assert block.twin is None or block.twin.twin is block, block.block_id
        for block_hash, block in self._cached.items():
            assert block.node is not None and block.node.block_hash == block_hash, block.block_id

    def _forget(self, block: Block) -> None:
        assert block.node is not None
        del self._cached[block.node.block_hash]
        block.node = None
