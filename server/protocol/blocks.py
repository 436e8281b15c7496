"""The answer of /debug/blocks."""

from pydantic import BaseModel, Field

from octavo.engine.core.block_map import BlockOwner


class BlockState(BaseModel):
    """One block of the pool; its place in the list is its id."""

    owner: BlockOwner = Field(description="What it is held for; free and cached are held by none.")
    ref_count: int = Field(description="Block tables that hold it; above 1 it is shared.")
    hashed: bool = Field(description="Whether a prefix may find it.")
    num_filled: int = Field(description="Tokens in it.")


class BlocksAnswer(BaseModel):
    """The block pool between two steps."""

    num_blocks: int
    num_used_blocks: int
    block_size: int = Field(description="Token slots per block.")
    num_wasted_slots: int = Field(description="Token slots of used blocks that hold no token.")
    waste: float = Field(description="Their share of all slots of used blocks, 0 to 1.")
    prefix_cache_queries: int
    prefix_cache_hits: int
    blocks: list[BlockState]
