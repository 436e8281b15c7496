"""The executor that runs the model in the engine's own thread, on one device."""

import logging
from dataclasses import dataclass, replace

import torch

from octavo.config.cache import CacheConfig
from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig
from octavo.engine.attention.metadata import KVCacheLayout
from octavo.engine.core.limits import HostMemory
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.loader import Checkpoint
from octavo.engine.loader.filling import load_model
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import LanguageModel, RunnerLimits
from octavo.engine.worker.memory import (
    CacheDemand,
    CacheSize,
    StepLimits,
    check_context,
    free_host_memory,
    host_budget,
    resolve_device,
    resolve_dtype,
    resolve_step_limits,
    size_cache,
    size_host_memory,
)
from octavo.engine.worker.model_runner import ModelRunner
from octavo.engine.worker.warm_up import measure_costs, warm_up
from octavo.kernels import ops

# As many as there are ways of sampling in the warm-up.
_WARM_UP_SEQS = 3

_logger = logging.getLogger(__name__)


class UniprocExecutor:
    """Loads the model, sizes the cache and runs steps."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        """Ready to serve once made: a first prefill and decode have run.

        Raises ConfigurationError for what does not fit, CheckpointError for damaged weights.
        """
        facts = checkpoint.model_config
        check_context(config.load.max_model_len, facts.max_model_len)
        device = resolve_device(config.device.device)
        dtype = resolve_dtype(config.load.dtype, facts)
        if device.type == "cpu":
            ops.set_cpu_threads(dtype, config.device.num_cpu_threads)
        steps = resolve_step_limits(config.scheduler, device)
        start = _Start(
            model=load_model(checkpoint, dtype, device),
            facts=facts,
            dtype=dtype,
            block_size=config.cache.block_size,
            steps=steps,
            device=device,
        )
        demand = start.cache_demand(config.cache.gpu_memory_utilization)
        size = size_cache(config.cache, config.load.max_model_len, demand)
        self._steps = steps
        self._size = size
        self._window = start.common_window
        self._host_memory = start.host_memory(config.cache, size)
        self._runner = start.make_runner(size, self._host_memory)
        warm_up(self._runner, _WARM_UP_SEQS, 2 * config.cache.block_size + 1)
        if self._runner.num_host_blocks and config.scheduler.preemption_mode == "auto":
            self._host_memory = replace(self._host_memory, costs=measure_costs(self._runner))
        _logger.info(
            "%s in %s on %s: %d cache blocks of %d tokens, context %d, %d sequences and %d tokens "
            "per step",
            checkpoint.name,
            str(dtype).removeprefix("torch."),
            device,
            size.num_blocks,
            config.cache.block_size,
            size.max_model_len,
            steps.max_num_seqs,
            steps.max_num_batched_tokens,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self._size.num_blocks

    @property
    def max_model_len(self) -> int:
        """The longest context that the checkpoint, the cache and the configuration allow."""
        return self._size.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in one step."""
        return self._steps.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens in one step."""
        return self._steps.max_num_batched_tokens

    @property
    def host_memory(self) -> HostMemory:
        """Blocks in host memory, and what it costs to use them."""
        return self._host_memory

    @property
    def window(self) -> int | None:
        """The longest sliding window; None where a layer sees everything."""
        return self._window

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        """Carries out one step."""
        return self._runner.execute(plan)

    def shutdown(self) -> None:
        """Gives up the model and the cache."""
        del self._runner


@dataclass(frozen=True, slots=True)
class _Start:
    """What is known before the size of the cache is: enough to make runners and to measure."""

    model: LanguageModel
    facts: ModelConfig
    dtype: torch.dtype
    block_size: int
    steps: StepLimits
    device: torch.device

    @property
    def common_window(self) -> int | None:
        windows = [window for window in self.facts.windows if window is not None]
        return max(windows) if len(windows) == self.facts.num_layers else None

    def host_memory(self, cache: CacheConfig, size: CacheSize) -> HostMemory:
        bytes_per_block = self._bytes_per_block
        free = free_host_memory()
        if self.device.type == "cpu":
            free = max(0, free - size.num_blocks * bytes_per_block)
        blocks_each = -(-size.max_model_len // self.block_size)
        most_useful = self.steps.max_num_seqs * blocks_each
        return size_host_memory(cache, bytes_per_block, free, most_useful)

    def make_runner(self, size: CacheSize, host_memory: HostMemory | None = None) -> ModelRunner:
        host_memory = host_memory or HostMemory()
        cache = KVCache(
            self._layout(size.num_blocks),
            self.facts.num_layers,
            self.device,
            host_memory.num_swap_blocks + host_memory.num_offload_blocks,
        )
        limits = RunnerLimits(
            max_num_seqs=self.steps.max_num_seqs,
            max_model_len=size.max_model_len,
            vocab_size=self.facts.vocab_size,
            eos_token_ids=self.facts.eos_token_ids,
            window=self.common_window,
        )
        return ModelRunner(self.model, cache, limits, self.device)

    def cache_demand(self, gpu_utilization: float) -> CacheDemand:
        if self.device.type == "cpu":
            free = free_host_memory()
            budget = host_budget(free)
        else:
            free, budget = self._measure_gpu(gpu_utilization)
        return CacheDemand(
            model_limit=self.facts.max_model_len,
            max_num_seqs=self.steps.max_num_seqs,
            bytes_per_block=self._bytes_per_block,
            free_bytes=free,
            budget_bytes=budget,
        )

    @property
    def _bytes_per_block(self) -> int:
        return self._layout(0).bytes_per_block * self.facts.num_layers

    def _layout(self, num_blocks: int) -> KVCacheLayout:
        facts = self.facts
        return KVCacheLayout(
            num_blocks, facts.num_kv_heads, self.block_size, facts.head_dim, self.dtype
        )

    def _measure_gpu(self, utilization: float) -> tuple[int, int]:
        """Bytes left beside the model and the largest step, and how many of them are granted."""
        num_seqs, device = self.steps.max_num_seqs, self.device
        tokens_each = -(-self.steps.max_num_batched_tokens // num_seqs)
        num_blocks = num_seqs * (tokens_each // self.block_size + 1)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        runner = self.make_runner(CacheSize(num_blocks, self.facts.max_model_len))
        cache_bytes = torch.cuda.memory_allocated(device) - before
        warm_up(runner, num_seqs, tokens_each)
        peak = torch.cuda.max_memory_allocated(device) - cache_bytes
        del runner
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        return total - others - peak, int(total * utilization) - others - peak
