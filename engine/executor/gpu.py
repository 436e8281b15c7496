"""What a start on a GPU measures and prepares before it serves."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from octavo.engine.core.errors import ConfigurationError
from octavo.engine.worker.decode_graphs import graph_sizes, wanted_graphs
from octavo.engine.worker.device_memory import DeviceMemory, MemorySum
from octavo.engine.worker.device_runner import DeviceRunner
from octavo.engine.worker.device_step import Bounds
from octavo.engine.worker.memory import StepLimits
from octavo.engine.worker.warm_up import warm_up, warm_up_variants

# Each graph's nodes are kept by the driver, beside the pool that all share.
_BYTES_PER_GRAPH = 4 * 1024**2

MakeRunner = Callable[[int], DeviceRunner]


@dataclass(frozen=True, slots=True)
class GpuStart:
    """Measures and warms up; `sizes` are the decode steps to record, none with --enforce-eager."""

    memory: DeviceMemory
    steps: StepLimits
    block_size: int
    bounds: Bounds
    sizes: list[int]

    @staticmethod
    def sizes_for(max_num_seqs: int, enforce_eager: bool) -> list[int]:
        """Numbers of rows of decode steps that are recorded."""
        return [] if enforce_eager else graph_sizes(max_num_seqs)

    def measure(self, make_runner: MakeRunner) -> MemorySum:
        """Runs the largest step and records the largest decode with a small cache.

        `make_runner` makes a runner with so many blocks; the weights are loaded already. Raises
        ConfigurationError, naming flags and values that fit, where that takes too much memory.
        """
        measured = self._try(make_runner)
        if measured is not None:
            return measured
        steps = self.steps
        told = (
            f"the GPU's memory does not hold the largest step beside the weights, with "
            f"--max-num-batched-tokens {steps.max_num_batched_tokens} and "
            f"--max-num-seqs {steps.max_num_seqs}; "
        )
        for smaller in self._smaller():
            # What failed before may have left something.
            gc.collect()
            if smaller._try(make_runner) is not None:
                fits = smaller.steps
                raise ConfigurationError(
                    f"{told}--max-num-batched-tokens {fits.max_num_batched_tokens} with "
                    f"--max-num-seqs {fits.max_num_seqs} would do"
                )
        raise ConfigurationError(f"{told}not even the smallest fits: use a smaller model")

    def _smaller(self) -> Iterator["GpuStart"]:
        tokens, seqs = self.steps.max_num_batched_tokens, self.steps.max_num_seqs
        while tokens > 1:
            tokens, seqs = tokens // 2, max(1, min(seqs, tokens) // 2)
            sizes = self.sizes_for(seqs, enforce_eager=not self.sizes)
            yield replace(self, steps=StepLimits(seqs, tokens), sizes=sizes)

    def _try(self, make_runner: MakeRunner) -> MemorySum | None:
        """None where the memory does not suffice, not even for a small cache."""
        try:
            return self._measure(make_runner)
        except (torch.OutOfMemoryError, ConfigurationError):
            return None

    def _measure(self, make_runner: MakeRunner) -> MemorySum:
        memory = self.memory
        memory.release()
        weights = memory.allocated()
        num_seqs = self.steps.max_num_seqs
        tokens_each = -(-self.steps.max_num_batched_tokens // num_seqs)
        runner = make_runner(num_seqs * (tokens_each // self.block_size + 1))
        small_cache = memory.allocated() - weights
        warm_up(runner, num_seqs, tokens_each)
        # A decode has all rows split as the longest context asks for, and each part takes memory.
        warm_up(runner, num_seqs, tokens_each, context=self.bounds.seq_lens[-1])
        activations = memory.peak() - weights - small_cache
        # They came with the small cache, and come again with the real one.
        rows = runner.row_bytes
        graphs = self._measure_graphs(runner)
        del runner
        gc.collect()
        memory.release()
        free, total = memory.free_and_total()
        others = total - free - memory.reserved()
        return MemorySum(total, others, memory.allocated(), activations, rows, graphs)

    def _measure_graphs(self, runner: DeviceRunner) -> int:
        if not self.sizes:
            return 0
        self.memory.release()
        before, _ = self.memory.free_and_total()
        runner.record(self.sizes[-1:])
        runner.synchronize()
        after, _ = self.memory.free_and_total()
        num_graphs = len(list(wanted_graphs(self.sizes, self.bounds.seq_lens)))
        return before - after + num_graphs * _BYTES_PER_GRAPH

    def prepare(self, runner: DeviceRunner) -> int:
        """Compiles all that steps may need and records; returns the number of graphs.

        What exists by then is no garbage, and need not be looked at again.
        """
        warm_up_variants(runner, self.bounds.query_lens, self.bounds.seq_lens)
        num_graphs = runner.record(self.sizes) if self.sizes else 0
        runner.synchronize()
        gc.collect()
        gc.freeze()
        return num_graphs
