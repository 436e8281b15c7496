"""What the blocks of the pool are used for."""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from octavo.engine.cache.block_pool import Block
from octavo.engine.cache.block_table import BlockTable
from octavo.engine.core.block_map import BlockInfo, BlockOwner
from octavo.engine.core.request import Sequence


class Holder(NamedTuple):
    """A sequence that holds blocks, its table, and how many tokens these have.

    Tokens count that a running step writes just now: their slots are in use.
    """

    sequence: Sequence
    table: BlockTable
    num_tokens: int


def num_wasted_slots(holders: SequenceOf[Holder], block_size: int) -> int:
    """Token slots of held blocks without a token."""
    waste = 0
    shared: set[int] = set()
    for _, table, num_tokens in holders:
        if not table.capacity and table.blocks:
            # Just forked: the last block counts once, whoever holds it.
            if table.blocks[-1].block_id in shared:
                continue
            shared.add(table.blocks[-1].block_id)
        waste += len(table.blocks) * block_size - num_tokens
    return waste


def describe_blocks(
    blocks: SequenceOf[Block], holders: SequenceOf[Holder], block_size: int
) -> tuple[BlockInfo, ...]:
    """One entry per block of the pool, in order."""
    uses: dict[int, tuple[BlockOwner, int]] = {}
    for sequence, table, num_tokens in holders:
        beams = sequence.request.params.use_beam_search
        for position, block in enumerate(table.blocks):
            start = position * block_size
            num_filled = max(0, min(block_size, num_tokens - start))
            if start < sequence.num_prompt_tokens:
                owner = BlockOwner.PROMPT
            else:
                owner = BlockOwner.BEAM if beams else BlockOwner.OUTPUT
            before = uses.get(block.block_id, (owner, 0))[1]
            uses[block.block_id] = (owner, max(num_filled, before))
    return tuple([_describe(block, uses.get(block.block_id), block_size) for block in blocks])


def _describe(block: Block, use: tuple[BlockOwner, int] | None, block_size: int) -> BlockInfo:
    hashed = block.node is not None
    if use is None:
        use = (BlockOwner.CACHED, block_size) if hashed else (BlockOwner.FREE, 0)
    return BlockInfo(use[0], block.ref_count, hashed, use[1])
