"""The executor that runs the model in the engine's own thread, on one device."""

import dataclasses
import logging

import torch

from octavo.config.engine import EngineConfig
from octavo.engine.attention.metadata import KVCacheLayout
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.loader import Checkpoint, load_model
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.memory import (
    CacheDemand,
    StepLimits,
    check_context,
    free_host_memory,
    host_budget,
    resolve_device,
    resolve_dtype,
    resolve_step_limits,
    size_cache,
)
from octavo.engine.worker.model_runner import LanguageModel, ModelRunner, RunnerLimits
from octavo.engine.worker.warm_up import warm_up

# As many as there are ways of sampling in the warm-up.
_WARM_UP_SEQS = 3

_logger = logging.getLogger(__name__)


class UniprocExecutor:
    """Loads the model, sizes the cache and runs steps.

    On CPU torch uses as many threads as OMP_NUM_THREADS says, by default one per physical core.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        """Ready to serve once made: a first prefill and decode have run.

        Raises ConfigurationError for what does not fit, CheckpointError for damaged weights.
        """
        facts = checkpoint.model_config
        check_context(config.load.max_model_len, facts.max_model_len)
        device = resolve_device(config.device.device)
        dtype = resolve_dtype(config.load.dtype, facts)
        steps = resolve_step_limits(config.scheduler, device)
        # The number of blocks is what remains to be found out.
        layout = KVCacheLayout(
            num_blocks=0,
            num_kv_heads=facts.num_kv_heads,
            block_size=config.cache.block_size,
            head_dim=facts.head_dim,
            dtype=dtype,
        )
        limits = RunnerLimits(
            max_num_seqs=steps.max_num_seqs,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
        )
        model = load_model(checkpoint, dtype, device)
        start = _Start(model, layout, facts.num_layers, limits, device)
        if device.type == "cpu":
            free = free_host_memory()
            budget = host_budget(free)
        else:
            free, budget = start.measure_gpu(steps, config.cache.gpu_memory_utilization)
        size = size_cache(
            config.cache,
            config.load.max_model_len,
            CacheDemand(
                model_limit=facts.max_model_len,
                max_num_seqs=steps.max_num_seqs,
                bytes_per_block=layout.bytes_per_block * facts.num_layers,
                free_bytes=free,
                budget_bytes=budget,
            ),
        )
        self._steps = steps
        self._size = size
        self._runner = start.make_runner(size.num_blocks, size.max_model_len)
        warm_up(self._runner, _WARM_UP_SEQS, 2 * layout.block_size + 1)
        _logger.info(
            "%s in %s on %s: %d cache blocks of %d tokens, context %d, %d sequences and %d tokens "
            "per step",
            checkpoint.name,
            dtype,
            device,
            size.num_blocks,
            layout.block_size,
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

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        """Carries out one step."""
        return self._runner.execute(plan)

    def shutdown(self) -> None:
        """Gives up the model and the cache."""
        del self._runner


@dataclasses.dataclass(frozen=True, slots=True)
class _Start:
    """What the start needs to make runners, of the right size once that is known."""

    model: LanguageModel
    layout: KVCacheLayout
    num_layers: int
    limits: RunnerLimits
    device: torch.device

    def make_runner(self, num_blocks: int, max_model_len: int) -> ModelRunner:
        layout = dataclasses.replace(self.layout, num_blocks=num_blocks)
        limits = dataclasses.replace(self.limits, max_model_len=max_model_len)
        cache = KVCache(layout, self.num_layers, self.device)
        return ModelRunner(self.model, cache, limits, self.device)

    def measure_gpu(self, steps: StepLimits, utilization: float) -> tuple[int, int]:
        """Bytes left beside the model and the largest step, and how many of them are granted."""
        tokens_each = -(-steps.max_num_batched_tokens // steps.max_num_seqs)
        blocks_each = tokens_each // self.layout.block_size + 1
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        runner = self.make_runner(steps.max_num_seqs * blocks_each, self.limits.max_model_len)
        cache_bytes = torch.cuda.memory_allocated(self.device) - before
        warm_up(runner, steps.max_num_seqs, tokens_each)
        peak = torch.cuda.max_memory_allocated(self.device) - cache_bytes
        del runner
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        return total - others - peak, int(total * utilization) - others - peak
