"""A picture of the block pool at one moment, for operators."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class BlockOwner(StrEnum):
    """What a block is held for. A block of a prompt that several choices share counts once."""

    FREE = "free"
    CACHED = "cached"  # held by nobody, kept for a hit
    PROMPT = "prompt"
    OUTPUT = "output"
    BEAM = "beam"


class BlockInfo(NamedTuple):
    """One block: how many tables hold it, whether a hit may find it, and its tokens."""

    owner: BlockOwner
    ref_count: int
    hashed: bool
    num_filled: int


@dataclass(frozen=True, slots=True)
class BlockMap:
    """All blocks by id.

    `num_wasted_slots` are token slots of held blocks that hold no token yet.
    """

    block_size: int
    blocks: tuple[BlockInfo, ...]
    num_wasted_slots: int

    @property
    def waste(self) -> float:
        """Share of the slots of held blocks that hold no token, 0 to 1."""
        held = sum(block.ref_count > 0 for block in self.blocks)
        return self.num_wasted_slots / (held * self.block_size) if held else 0.0
