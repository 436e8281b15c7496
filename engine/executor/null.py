"""The executor without a model: what is left to measure is everything around it."""

import time
from itertools import cycle

from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.worker.memory import check_context, resolve_device, resolve_step_limits


class NullExecutor:
    """Gives each sequence a token per step, whatever was asked; never log-probabilities.

    A step ends at once, or with `--null-step-ms` when the clock shows a multiple of it.

    The tokens walk through the vocabulary and leave out those that end a text, so an answer is as
    long as its max_tokens. The cache exists as numbers of blocks only.
    """

    def __init__(self, config: EngineConfig, facts: ModelConfig) -> None:
        """Raises ConfigurationError for a context beyond the checkpoint's."""
        check_context(config.load.max_model_len, facts.max_model_len)
        steps = resolve_step_limits(config.scheduler, resolve_device(config.device.device))
        self.max_num_seqs = steps.max_num_seqs
        self.max_num_batched_tokens = steps.max_num_batched_tokens
        self.max_model_len = config.load.max_model_len or facts.max_model_len
        blocks_each = -(-self.max_model_len // config.cache.block_size)
        self.num_blocks = config.cache.num_gpu_blocks_override or self.max_num_seqs * blocks_each
        self._step_s = config.load.null_step_ms / 1000
        ends = frozenset(facts.eos_token_ids)
        self._tokens = cycle([(i,) for i in range(facts.vocab_size) if i not in ends])

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        """Carry out one step."""
        sampled: dict[int, tuple[int, ...]] = {}
        for item in plan.scheduled:
            if item.sample:
                sampled[item.seq_id] = next(self._tokens)
                for fork in item.forks:
                    sampled[fork.seq_id] = next(self._tokens)
        if self._step_s > 0:
            time.sleep(self._step_s - time.monotonic() % self._step_s)
        return ModelOutput(sampled)

    def shutdown(self) -> None:
        """Nothing is held."""
