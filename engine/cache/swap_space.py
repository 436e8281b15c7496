"""Blocks in host memory that hold what preempted sequences had computed."""

from octavo.engine.cache.block_pool import Block, HostBlock


class SwapSpace:
    """Host blocks by number of saved tables that hold them.

    While a saved full block is still in the cache too, because another sequence holds it or nobody
    has taken it for new content, the two are twins: saving it again costs nothing, and bringing it
    back is taking the twin. A block that is not full has no twin, since it may still be written.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_used_blocks = 0
        # Ids that were used and given back; those from `_next_id` on never were.
        self._free_ids: list[int] = []
        self._next_id = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no saved table holds."""
        return self.num_blocks - self.num_used_blocks

    def take(self) -> HostBlock:
        """A free block, without a holder yet; there must be one."""
        assert self.num_free_blocks > 0
        self.num_used_blocks += 1
        if self._free_ids:
            return HostBlock(self._free_ids.pop())
        self._next_id += 1
        return HostBlock(self._next_id - 1)

    def release(self, host: HostBlock) -> None:
        """Drop one holder; without any the block is free."""
        host.ref_count -= 1
        if host.ref_count == 0:
            if host.twin is not None:
                host.twin.twin = None
                host.twin = None
            self._free_ids.append(host.block_id)
            self.num_used_blocks -= 1


def link(block: Block, host: HostBlock) -> None:
    """Make the two twins; neither has one."""
    assert block.twin is None and host.twin is None
    block.twin, host.twin = host, block
