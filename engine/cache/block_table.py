"""Which blocks hold the keys and values of one sequence."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from octavo.engine.cache.block_pool import Block, HostBlock
    from octavo.engine.cache.prefix_hash import BlockKey, PrefixNode


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
    The first `num_outside` blocks have been given up for good, since the sliding window has left
    them; the null block stands in their places.
    While the sequence is swapped out, `saved` holds its computed blocks in place of `blocks`, and
    None where nothing has to come back.
    """

    __slots__ = (
        "awaited",
        "blocks",
        "capacity",
        "keys",
        "node",
        "num_announced",
        "num_cached_blocks",
        "num_outside",
        "root",
        "saved",
    )

    def __init__(self, root: "PrefixNode") -> None:
        self.root = root
        self.blocks: list[Block] = []
        self.saved: list[HostBlock | None] = []
        self.num_outside = 0
        self.keys: list[BlockKey] = []
        self.node = root
        self.num_cached_blocks = 0
        self.num_announced = 0
        self.awaited: bytes | None = None
        self.capacity = 0
