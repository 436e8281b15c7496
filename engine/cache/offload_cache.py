"""The second tier of the prefix cache: full blocks that were evicted, kept in host memory."""

from collections import OrderedDict
from typing import Final

from octavo.engine.cache.prefix_hash import BlockKey, PrefixNode


class OffloadedBlock:
    """A block in host memory and its content. No table holds it: a hit copies it back."""

    __slots__ = ("block_id", "node")
    ref_count: Final = 0

    def __init__(self, block_id: int, node: PrefixNode) -> None:
        self.block_id = block_id
        self.node = node


class OffloadCache:
    """Evicted blocks by hash; the one that was used least recently makes room.

    A block that takes part in a copy of the step being planned is pinned: it is neither given up
    nor overwritten before the copy is done.
    """

    def __init__(self, num_blocks: int, first_id: int) -> None:
        self.num_blocks = num_blocks
        self._first_id = first_id
        self._blocks: OrderedDict[bytes, OffloadedBlock] = OrderedDict()
        self._pinned: set[int] = set()

    def __len__(self) -> int:
        """Blocks that hold content."""
        return len(self._blocks)

    def lookup(self, key: BlockKey, parent: PrefixNode) -> OffloadedBlock | None:
        """The block with exactly this content, if it is kept."""
        block = self._blocks.get(key.block_hash)
        if block is None or not block.node.matches(key.token_bytes, parent):
            return None
        self._blocks.move_to_end(key.block_hash)
        return block

    def store(self, node: PrefixNode) -> int | None:
        """Where to copy an evicted block; None when it is kept already or there is no room."""
        if node.block_hash in self._blocks:
            self._blocks.move_to_end(node.block_hash)
            return None
        block_id = self._first_id + len(self._blocks)
        if len(self._blocks) == self.num_blocks:
            block_hash, oldest = next(iter(self._blocks.items()))
            if oldest.block_id in self._pinned:
                return None
            del self._blocks[block_hash]
            block_id = oldest.block_id
        block = self._blocks[node.block_hash] = OffloadedBlock(block_id, node)
        self.pin(block)
        return block_id

    def pin(self, block: OffloadedBlock) -> None:
        """Keep a block as it is until the copies of the step are done."""
        self._pinned.add(block.block_id)
        self._blocks.move_to_end(block.node.block_hash)

    def unpin_all(self) -> None:
        """The copies of the step have been handed out; later ones come after them."""
        self._pinned.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._pinned.clear()

    def check_integrity(self) -> None:
        """Assert that no two blocks share memory and all are found by their hash."""
        ids = [block.block_id for block in self._blocks.values()]
        assert len(set(ids)) == len(ids) <= self.num_blocks
        assert all(0 <= block_id - self._first_id < self.num_blocks for block_id in ids)
        assert all(key == block.node.block_hash for key, block in self._blocks.items())
