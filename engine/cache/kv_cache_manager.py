"""Block tables: which blocks hold the keys and values of each sequence."""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from octavo.engine.cache.block_pool import Block, BlockPool, HostBlock
from octavo.engine.cache.block_table import UNCHANGED, Allocation, BlockTable
from octavo.engine.cache.inspection import Holder, describe_blocks, num_wasted_slots
from octavo.engine.cache.offload_cache import OffloadCache, OffloadedBlock
from octavo.engine.cache.prefix_hash import (
    BlockKey,
    HashFunction,
    PrefixNode,
    block_key,
    root_node,
    sha256_hash,
)
from octavo.engine.cache.swap_space import SwapSpace, link
from octavo.engine.core.block_map import BlockInfo
from octavo.engine.core.limits import HostMemory
from octavo.engine.core.request import Sequence

BlockCopies = tuple[tuple[int, int], ...]
Held = Iterable[tuple[Sequence, int]]
"""Sequences with the number of tokens in their blocks."""
CachedBlock = Block | OffloadedBlock


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
        host_memory: HostMemory | None = None,
        window: int | None = None,
    ) -> None:
        host_memory = host_memory or HostMemory()
        self.block_size = block_size
        self.swap_space = SwapSpace(host_memory.num_swap_blocks)
        self.offload_cache = OffloadCache(
            host_memory.num_offload_blocks, first_id=host_memory.num_swap_blocks
        )
        offloads = enable_prefix_caching and host_memory.num_offload_blocks > 0
        self._offloads = offloads
        self._pool = BlockPool(num_blocks, self._offload if offloads else None)
        # Copies of the step that is being planned: (source, destination).
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []
        self.num_swapped_out = 0
        self.num_swapped_in = 0
        self.num_offload_hits = 0
        self._tables: dict[int, BlockTable] = {}
        # Where all layers have a sliding window, blocks that it has left are given up. This one
        # takes their place: it is outside the pool, and attention never reads it.
        self._window = window
        self._null = Block(num_blocks)
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

    def get_computed_blocks(self, sequence: Sequence) -> list[CachedBlock]:
        """The longest run of cached blocks that the sequence begins with, offloaded ones included.

        The last known token is never among them: its logits are needed, so it is computed. The
        blocks are not held yet; `allocate_slots` takes them.
        """
        if not self._caching:
            return []
        table = self._tables.get(sequence.seq_id) or self._new_table(sequence)
        assert not table.blocks, sequence.seq_id
        hits: list[CachedBlock] = []
        node = table.root
        max_hits = (sequence.num_tokens - 1) // self.block_size
        self._extend_keys(table, sequence, max_hits)
        for position in range(max_hits):
            key = table.keys[position]
            block: CachedBlock | None = self._pool.lookup(key, node)
            if block is None and self._offloads:
                block = self.offload_cache.lookup(key, node)
            if block is None or block.node is None:
                break
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
        computed_blocks: SequenceOf[CachedBlock] = (),
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
            if block is self._null:
                table.node = PrefixNode(key, table.node)
            else:
                table.node = block.node or self._pool.register(block, key, table.node)
        if table.num_announced > table.num_cached_blocks:
            self._withdraw(table, sequence.seq_id, num_full)
        table.num_cached_blocks = num_full

    def free_outside_window(self, sequence: Sequence) -> None:
        """Give up the blocks that no token to come can see, where all layers have a window.

        They stay in the prefix cache like others. A later hit needs the whole run from the start
        of the prompt, although the last window would do: that keeps one rule for all models, and
        costs a miss where the head of a long text was evicted before its tail.
        """
        if self._window is None:
            return
        table = self._tables[sequence.seq_id]
        first = max(0, sequence.num_computed_tokens - self._window + 1) // self.block_size
        for position in range(table.num_outside, first):
            self._release(table.blocks[position])
            table.blocks[position] = self._null
        table.num_outside = max(table.num_outside, first)

    def _release(self, block: Block) -> None:
        if block is not self._null:
            self._pool.release(block)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`, the partly filled last one included.

        All that `parent` has computed, `child` must begin with.
        """
        source = self._tables[parent.seq_id]
        table = self._new_table(child)
        for block in source.blocks[source.num_outside :]:
            self._pool.share(block)
        table.num_outside = source.num_outside
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
        table.awaited = None
        for block in reversed(table.blocks):
            self._release(block)
        table.blocks = []
        table.num_outside = 0
        table.capacity = 0
        table.node = table.root
        table.num_cached_blocks = 0

    def remove(self, sequence: Sequence) -> None:
        """Give up all that is held for a sequence; nothing happens when there is nothing."""
        if sequence.seq_id in self._tables:
            self.free(sequence)
            self._release_saved(self._tables.pop(sequence.seq_id))

    def _release_saved(self, table: BlockTable) -> None:
        for host in table.saved:
            if host is not None:
                self.swap_space.release(host)
        table.saved = []

    # Swapping: what was computed goes to host memory and comes back.

    def num_blocks_to_save(self, sequences: SequenceOf[Sequence]) -> int:
        """Blocks that have to be copied to swap these sequences out; shared ones count once."""
        return len(
            {
                block.block_id
                for sequence in sequences
                for block in self._computed_blocks(sequence)
                if block.twin is None
            }
        )

    def num_distinct_tokens(self, sequences: SequenceOf[Sequence]) -> int:
        """Tokens to compute again if these sequences lost their blocks; shared ones count once."""
        blocks = {
            block.block_id for sequence in sequences for block in self._computed_blocks(sequence)
        }
        num_computed = sum(sequence.num_computed_tokens for sequence in sequences)
        return min(num_computed, len(blocks) * self.block_size)

    def swap_out(self, sequences: SequenceOf[Sequence], dropped_copies: Mapping[int, int]) -> bool:
        """Save what these sequences have computed and give up their blocks; a block once.

        False, with nothing changed, when the swap space is too small. `dropped_copies` maps the
        destination of block copies that were planned in this step for these sequences, and will
        not be done, to the source.
        """
        # A planned copy may have been of a block that has a twin, so this is the upper bound.
        bound = {
            dropped_copies.get(block.block_id, block.block_id)
            for sequence in sequences
            for block in self._computed_blocks(sequence)
            if block.twin is None
        }
        if len(bound) > self.swap_space.num_free_blocks:
            return False
        saved: dict[int, HostBlock] = {}
        for sequence in sequences:
            num_full = sequence.num_computed_tokens // self.block_size
            table = self._tables[sequence.seq_id]
            table.saved = [None] * table.num_outside
            for position, block in enumerate(self._computed_blocks(sequence), table.num_outside):
                source = dropped_copies.get(block.block_id, block.block_id)
                host = block.twin or saved.get(source)
                if host is None:
                    host = saved[source] = self.swap_space.take()
                    self._swap_out.append((source, host.block_id))
                    if position < num_full and source == block.block_id:
                        link(block, host)
                host.ref_count += 1
                table.saved.append(host)
        for sequence in sequences:
            self.free(sequence)
        self.num_swapped_out += len(saved)
        return True

    def num_swap_in_blocks(self, sequences: SequenceOf[Sequence]) -> int:
        """Free blocks that these swapped sequences need for all their known tokens."""
        needed = 0
        absent: set[int] = set()
        for sequence in sequences:
            num_full = sequence.num_computed_tokens // self.block_size
            needed += self.blocks_for(sequence.num_tokens) - num_full
            absent |= {
                host.block_id
                for host in self._tables[sequence.seq_id].saved[:num_full]
                if host is not None and (host.twin is None or host.twin.ref_count == 0)
            }
        return needed + len(absent)

    def swap_in(self, sequences: SequenceOf[Sequence]) -> None:
        """Bring back what was saved; there must be room for `num_swap_in_blocks`."""
        restored: dict[int, Block] = {}
        for sequence in sequences:
            table = self._tables[sequence.seq_id]
            for host in table.saved:
                if host is None:
                    table.blocks.append(self._null)
                    table.num_outside += 1
                    continue
                block = host.twin or restored.get(host.block_id)
                if block is None:
                    block = self._restore(host, len(table.blocks), sequence)
                    restored[host.block_id] = block
                else:
                    self._pool.share(block)
                table.blocks.append(block)
            self._release_saved(table)
            self.cache_full_blocks(sequence)

    def _restore(self, host: HostBlock, position: int, sequence: Sequence) -> Block:
        (block,) = self._pool.allocate(1)
        self._swap_in.append((host.block_id, block.block_id))
        self.num_swapped_in += 1
        if position < sequence.num_computed_tokens // self.block_size:
            link(block, host)
        return block

    def _computed_blocks(self, sequence: Sequence) -> list[Block]:
        """The blocks with computed tokens that the sequence holds."""
        table = self._tables[sequence.seq_id]
        return table.blocks[table.num_outside : self.blocks_for(sequence.num_computed_tokens)]

    def take_transfers(self) -> tuple[BlockCopies, BlockCopies]:
        """The copies to host memory and back that the step begins with; called once a step."""
        if not (self._swap_out or self._swap_in):
            return (), ()
        transfers = tuple(self._swap_out), tuple(self._swap_in)
        self._swap_out, self._swap_in = [], []
        self.offload_cache.unpin_all()
        return transfers

    def _offload(self, block: Block, node: PrefixNode) -> None:
        host_id = self.offload_cache.store(node)
        if host_id is not None:
            self._swap_out.append((block.block_id, host_id))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, with nothing changed, while blocks are in use."""
        if not self._pool.forget_all():
            return False
        self.offload_cache.clear()
        return True

    def clear(self) -> None:
        """Take everything back at once, whatever a failed step has left behind."""
        self._tables.clear()
        self._writers.clear()
        self._swap_out.clear()
        self._swap_in.clear()
        self._pool = BlockPool(self.num_blocks, self._offload if self._offloads else None)
        self.swap_space = SwapSpace(self.swap_space.num_blocks)
        self.offload_cache.clear()

    # What others may look at.

    def num_wasted_slots(self, held: Held) -> int:
        """Token slots of held blocks without a token; `held` are all sequences that hold blocks."""
        return num_wasted_slots(self._holders(held), self.block_size)

    def describe_blocks(self, held: Held) -> tuple[BlockInfo, ...]:
        """All blocks by id; `held` are all sequences that hold blocks."""
        return describe_blocks(self._pool.blocks(), self._holders(held), self.block_size)

    def _holders(self, held: Held) -> list[Holder]:
        tables = self._tables
        return [Holder(item, tables[item.seq_id], num_tokens) for item, num_tokens in held]

    def check_integrity(self) -> None:
        """Assert that free list, reference counts, tables and hashes agree."""
        holders = Counter(
            block.block_id
            for table in self._tables.values()
            for block in table.blocks[table.num_outside :]
        )
        self._pool.check_integrity(holders)
        self._check_host_memory()
        for block_hash, seq_id in self._writers.items():
            table = self._tables[seq_id]
            pending = table.keys[table.num_cached_blocks : table.num_announced]
            assert block_hash in [key.block_hash for key in pending]
        for table in self._tables.values():
            ids = [block.block_id for block in table.blocks[table.num_outside :]]
            assert len(set(ids)) == len(ids) and self._null.block_id not in ids
            assert table.num_cached_blocks <= len(table.blocks)
            assert table.capacity in (0, len(table.blocks) * self.block_size)
            writable = table.blocks[table.num_cached_blocks :] if table.capacity else []
            assert not self._caching or all(block.ref_count == 1 for block in writable)

    def _check_host_memory(self) -> None:
        assert not (self._swap_out or self._swap_in), "copies that no step does"
        self.offload_cache.check_integrity()
        held = Counter(host for table in self._tables.values() for host in table.saved if host)
        assert len({host.block_id for host in held}) == len(held)
        assert len(held) == self.swap_space.num_used_blocks
        for host, count in held.items():
            assert host.ref_count == count
            assert host.twin is None or host.twin.twin is host
        assert all(not (table.saved and table.blocks) for table in self._tables.values())

    def _withdraw(self, table: BlockTable, seq_id: int, end: int) -> None:
        """Nobody has to wait any more for announced blocks before `end`."""
        for key in table.keys[table.num_cached_blocks : min(end, table.num_announced)]:
            if self._writers.get(key.block_hash) == seq_id:
                del self._writers[key.block_hash]

    def _take_computed(self, table: BlockTable, computed: SequenceOf[CachedBlock]) -> None:
        # What is here already is held before blocks are taken for the rest, which evicts others.
        for hit in computed:
            if isinstance(hit, OffloadedBlock):
                self.offload_cache.pin(hit)
            else:
                self._pool.share(hit)
        for key, hit in zip(table.keys, computed, strict=False):
            block = self._load(hit, key, table.node) if isinstance(hit, OffloadedBlock) else hit
            table.node = block.node or PrefixNode(key, table.node)
            table.blocks.append(block)
        table.num_cached_blocks += len(computed)

    def _load(self, hit: OffloadedBlock, key: BlockKey, parent: PrefixNode) -> Block:
        (block,) = self._pool.allocate(1)
        self._pool.register(block, key, parent)
        self._swap_in.append((hit.block_id, block.block_id))
        self.num_offload_hits += 1
        return block

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
