"""How full the blocks are, and how many tables share them, over the steps of a run."""

from dataclasses import dataclass

from octavo.engine.llm_engine import LLMEngine


@dataclass(slots=True)
class Occupancy:
    """Sums over all steps, in token slots; sequences that run at once are counted as requests."""

    used_slots: int = 0
    wasted_slots: int = 0
    running: int = 0
    peak_running: int = 0
    num_steps: int = 0

    def __call__(self, engine: LLMEngine) -> None:
        """Look at the cache after a step."""
        stats = engine.stats()
        self.used_slots += stats.num_used_blocks * stats.block_size
        self.wasted_slots += stats.num_wasted_slots
        self.running += stats.num_running
        self.peak_running = max(self.peak_running, stats.num_running)
        self.num_steps += 1

    @property
    def waste(self) -> float:
        """Share of the held slots without a token, 0 to 1."""
        return self.wasted_slots / self.used_slots

    def contiguous_waste(self, max_model_len: int) -> float:
        """The same had each running sequence held `max_model_len` slots in one piece."""
        num_tokens = self.used_slots - self.wasted_slots
        return 1 - num_tokens / (self.running * max_model_len)


@dataclass(slots=True)
class Sharing:
    """Blocks that are held, and those that would be if every table had its own; over all steps."""

    held: int = 0
    unshared: int = 0
    peak_held: int = 0
    peak_unshared: int = 0

    def __call__(self, engine: LLMEngine) -> None:
        """Look at the cache after a step."""
        counts = [block.ref_count for block in engine.block_map().blocks if block.ref_count]
        self.held += len(counts)
        self.unshared += sum(counts)
        self.peak_held = max(self.peak_held, len(counts))
        self.peak_unshared = max(self.peak_unshared, sum(counts))

    @property
    def saved(self) -> float:
        """Share of the blocks that sharing saves, 0 to 1."""
        return 1 - self.held / self.unshared
