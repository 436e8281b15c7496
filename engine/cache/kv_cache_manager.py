"""Block tables: which blocks hold the keys and values of each sequence."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from octavo.engine.cache.block_pool import Block, BlockPool
from octavo.engine.cache.prefix_hash import (
    BlockKey,
    HashFunction,
    PrefixNode,
    block_key,
    root_node,
    sha256_hash,
)
from octavo.engine.core.request import Sequence


class Allocation(NamedTuple):
    """Change of one block table: `new_block_ids` go into its entries from `block_offset` on.

    `block_copies` lists (source, destination) of blocks to copy before anything is written.
    """

    block_offset: int
    new_block_ids: tuple[int, ...]
    block_copies: tuple[tuple[int, int], ...] = ()


UNCHANGED = Allocation(0, ())


class BlockTable:
    """The blocks of one sequence, in order, and what is known of their content.

    `keys` holds the key of each full block of known tokens and survives a preemption. The first
    `num_cached_blocks` blocks have been offered for reuse; `node` is the content of the last one.
    The sequence computes the blocks from there to `num_announced` itself, and others may wait for
    them; it waits itself for the block with the hash `awaited` if another one computes that.
    Tokens before position `capacity` need no change of the table: their slots are there and, but
    for what is computed already, held by this sequence alone.
    """

    __slots__ = (
        "awaited",
        "blocks",
        "capacity",
        "keys",
        "node",
        "num_announced",
        "num_cached_blocks",
        "root",
    )

    def __init__(self, root: PrefixNode) -> None:
        self.root = root
        self.blocks: list[Block] = []
        self.keys: list[BlockKey] = []
        self.node = root
        self.num_cached_blocks = 0
        self.num_announced = 0
        self.awaited: bytes | None = None
        self.capacity = 0


class KVCacheManager:
    """Owns the pool and the block tables; asked by the scheduler between forward passes only.

    "Full" is the return value None, never an exception.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = sha256_hash,
    ) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, BlockTable] = {}
        # Which sequence computes the block with a hash just now.
        self._writers: dict[bytes, int] = {}
        self._caching = enable_prefix_caching
        self._hash_function = hash_function

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one sequence holds."""
        return self._pool.num_blocks - self._pool.num_free_blocks

    def block_ids(self, sequence: Sequence) -> tuple[int, ...]:
        """The block table of a sequence."""
        return tuple([block.block_id for block in self._tables[sequence.seq_id].blocks])

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """Blocks that the known tokens of a sequence need beyond those that it holds."""
        return self.blocks_for(sequence.num_tokens) - len(self._tables[sequence.seq_id].blocks)

    def get_computed_blocks(self, sequence: Sequence) -> list[Block]:
        """The longest run of cached blocks that the sequence begins with.

        The last known token is never among them: its logits are needed, so it is computed. The
        blocks are not held yet; `allocate_slots` takes them.
        """
        if not self._caching:
            return []
        table = self._tables.get(sequence.seq_id) or self._new_table(sequence)
        assert not table.blocks, sequence.seq_id
        hits: list[Block] = []
        node = table.root
        max_hits = (sequence.num_tokens - 1) // self.block_size
        self._extend_keys(table, sequence, max_hits)
        for position in range(max_hits):
            block = self._pool.lookup(table.keys[position], node)
            if block is None:
                break
            assert block.node is not None
            hits.append(block)
            node = block.node
        table.awaited = table.keys[len(hits)].block_hash if len(hits) < max_hits else None
        return hits

    def awaits_block(self, sequence: Sequence) -> bool:
        """True while the first block that the sequence lacks is computed by another one.

        As of the last `get_computed_blocks`; False before. A hash that collides only makes it
        wait for nothing.
        """
        table = self._tables.get(sequence.seq_id)
        return table is not None and table.awaited in self._writers

    def announce(self, sequence: Sequence) -> None:
        """Let others wait for the full blocks that a sequence begins to compute."""
        if not self._caching:
            return
        table = self._tables[sequence.seq_id]
        table.num_announced = sequence.num_tokens // self.block_size
        self._extend_keys(table, sequence, table.num_announced)
        for key in table.keys[table.num_cached_blocks : table.num_announced]:
            self._writers.setdefault(key.block_hash, sequence.seq_id)

    def allocate_slots(
        self,
        sequence: Sequence,
        num_new_tokens: int,
        computed_blocks: SequenceOf[Block] = (),
        num_reserved_blocks: int = 0,
    ) -> Allocation | None:
        """Make room for the next `num_new_tokens` tokens, after `computed_blocks` on a start.

        A shared block that would be written is replaced by a copy. None, with nothing changed,
        when fewer than `num_reserved_blocks` blocks would stay free.
        """
        table = self._tables.get(sequence.seq_id) or self._new_table(sequence)
        start = sequence.num_computed_tokens + len(computed_blocks) * self.block_size
        end = start + num_new_tokens
        if end <= table.capacity:
            return UNCHANGED
        first_written = start // self.block_size
        num_new = self.blocks_for(end) - len(table.blocks) - len(computed_blocks)
        shared = first_written < len(table.blocks) and table.blocks[first_written].ref_count > 1
        num_taken = num_new + shared + sum(block.ref_count == 0 for block in computed_blocks)
        if num_taken + num_reserved_blocks > self._pool.num_free_blocks:
            return None
        self._take_computed(table, computed_blocks)
        allocation = self._extend(table, first_written if shared else None, num_new)
        table.capacity = len(table.blocks) * self.block_size
        return allocation

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Offer for reuse all blocks that computed tokens fill, after the step that wrote them."""
        if not self._caching:
            return
        table = self._tables[sequence.seq_id]
        num_full = sequence.num_computed_tokens // self.block_size
        self._extend_keys(table, sequence, num_full)
        for position in range(table.num_cached_blocks, num_full):
            block, key = table.blocks[position], table.keys[position]
            table.node = self._pool.register(block, key, table.node)
        if table.num_announced > table.num_cached_blocks:
            self._withdraw(table, sequence.seq_id, num_full)
        table.num_cached_blocks = num_full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`, the partly filled last one included.

        All that `parent` has computed, `child` must begin with.
        """
        source = self._tables[parent.seq_id]
        table = self._new_table(child)
        for block in source.blocks:
            self._pool.share(block)
        table.blocks = list(source.blocks)
        table.keys = source.keys[: parent.num_computed_tokens // self.block_size]
        table.node = source.node
        table.num_cached_blocks = source.num_cached_blocks
        # Both now have to look before they write into the last block.
        table.capacity = source.capacity = 0

    def free(self, sequence: Sequence) -> None:
        """Give up all blocks of a sequence that may resume; its keys stay.

        Tail first: shared heads are the most useful to others, so they are reused last.
        """
        table = self._tables[sequence.seq_id]
        self._withdraw(table, sequence.seq_id, table.num_announced)
        table.num_announced = 0
        for block in reversed(table.blocks):
            self._pool.release(block)
        table.blocks = []
        table.capacity = 0
        table.node = table.root
        table.num_cached_blocks = 0

    def remove(self, sequence: Sequence) -> None:
        """Give up all that is held for a sequence; nothing happens when there is nothing."""
        if sequence.seq_id in self._tables:
            self.free(sequence)
            del self._tables[sequence.seq_id]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, with nothing changed, while blocks are in use."""
        return self._pool.forget_all()

    def check_integrity(self) -> None:
        """Assert that free list, reference counts, tables and hashes agree."""
        holders = Counter(
            block.block_id for table in self._tables.values() for block in table.blocks
        )
        self._pool.check_integrity(holders)
        for block_hash, seq_id in self._writers.items():
            table = self._tables[seq_id]
            pending = table.keys[table.num_cached_blocks : table.num_announced]
            assert block_hash in [key.block_hash for key in pending]
        for table in self._tables.values():
            ids = [block.block_id for block in table.blocks]
            assert len(set(ids)) == len(ids)
            assert table.num_cached_blocks <= len(table.blocks)
            assert table.capacity in (0, len(table.blocks) * self.block_size)
            writable = table.blocks[table.num_cached_blocks :] if table.capacity else []
            assert not self._caching or all(block.ref_count == 1 for block in writable)

    def _withdraw(self, table: BlockTable, seq_id: int, end: int) -> None:
        """Nobody has to wait any more for announced blocks before `end`."""
        for key in table.keys[table.num_cached_blocks : min(end, table.num_announced)]:
            if self._writers.get(key.block_hash) == seq_id:
                del self._writers[key.block_hash]

    def _take_computed(self, table: BlockTable, computed_blocks: SequenceOf[Block]) -> None:
        for block in computed_blocks:
            self._pool.share(block)
            assert block.node is not None
            table.node = block.node
        table.blocks.extend(computed_blocks)
        table.num_cached_blocks += len(computed_blocks)

    def _extend(self, table: BlockTable, copied: int | None, num_new: int) -> Allocation:
        if num_new == 0 and copied is None:
            return UNCHANGED
        blocks = table.blocks
        new_blocks = self._pool.allocate(num_new + (copied is not None))
        new_block_ids = tuple([block.block_id for block in new_blocks])
        if copied is None:
            offset = len(blocks)
            blocks.extend(new_blocks)
            return Allocation(offset, new_block_ids)
        source = blocks[copied]
        self._pool.release(source)
        blocks[copied:] = new_blocks
        return Allocation(copied, new_block_ids, ((source.block_id, new_block_ids[0]),))

    def _new_table(self, sequence: Sequence) -> BlockTable:
        assert sequence.seq_id not in self._tables, sequence.seq_id
        root = root_node(sequence.request.cache_salt, self._hash_function)
        table = self._tables[sequence.seq_id] = BlockTable(root)
        return table

    def _extend_keys(self, table: BlockTable, sequence: Sequence, count: int) -> None:
        keys, size, token_ids = table.keys, self.block_size, sequence.token_ids
        parent_hash = keys[-1].block_hash if keys else table.root.block_hash
        for start in range(len(keys) * size, count * size, size):
            key = block_key(parent_hash, token_ids[start : start + size], self._hash_function)
            parent_hash = key.block_hash
            keys.append(key)
