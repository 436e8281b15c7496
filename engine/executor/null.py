"""The executor without a model: what is left to measure is everything around it."""

import time
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig
from octavo.engine.attention.metadata import ForwardBatch, KVCacheLayout
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import NewSequence, SchedulerOutput
from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.input_batch import DrawBatch
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import RunnerLimits
from octavo.engine.worker.memory import check_context, resolve_device, resolve_step_limits
from octavo.engine.worker.model_runner import ModelRunner
from octavo.engine.worker.sampler import Sampled

_CPU = torch.device("cpu")
# The logit of an end of a text among zeros: finite, and nothing that a beam chooses.
_UNLIKELY = -1e4


class NullExecutor:
    """Gives each sequence a token per step, whatever was asked; never log-probabilities.

    Steps go through the runner of a CPU, which tracks rows and builds batches as always; only the
    model and the sampler are missing. A step ends at once, or with `--null-step-ms` when the clock
    shows a multiple of it.

    The tokens walk through the vocabulary and leave out those that end a text, so an answer is as
    long as its max_tokens. Beams go on with any others. The cache exists as numbers of blocks only.
    """

    def __init__(self, config: EngineConfig, facts: ModelConfig) -> None:
        """Raises ConfigurationError for a context beyond the checkpoint's."""
        check_context(config.load.max_model_len, facts.max_model_len)
        steps = resolve_step_limits(config.scheduler, resolve_device(config.device.device))
        self.max_num_seqs = steps.max_num_seqs
        self.max_num_batched_tokens = steps.max_num_batched_tokens
        self.max_model_len = config.load.max_model_len or facts.max_model_len
        block_size = config.cache.block_size
        blocks_each = -(-self.max_model_len // block_size)
        self.num_blocks = config.cache.num_gpu_blocks_override or self.max_num_seqs * blocks_each
        self._step_s = config.load.null_step_ms / 1000
        limits = RunnerLimits(
            self.max_num_seqs, self.max_model_len, facts.vocab_size, facts.eos_token_ids
        )
        layout = KVCacheLayout(
            self.num_blocks, facts.num_kv_heads, block_size, facts.head_dim, torch.float32
        )
        tokens = np.setdiff1d(np.arange(facts.vocab_size), facts.eos_token_ids)
        model, walk = _NullModel(facts, tokens), _VocabularyWalk(tokens)
        self._runner = ModelRunner(model, KVCache(layout, 0, _CPU), limits, _CPU, walk)

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        """Carry out one step."""
        if any(map(_wants_logprobs, plan.new_sequences)):
            plan = replace(plan, new_sequences=tuple(map(_without_logprobs, plan.new_sequences)))
        output = self._runner.execute(plan)
        if self._step_s > 0:
            time.sleep(self._step_s - time.monotonic() % self._step_s)
        return output

    def shutdown(self) -> None:
        """Nothing is held."""


def _wants_logprobs(sequence: NewSequence) -> bool:
    params = sequence.params
    return params.logprobs is not None or params.prompt_logprobs is not None


def _without_logprobs(sequence: NewSequence) -> NewSequence:
    params = replace(sequence.params, logprobs=None, prompt_logprobs=None)
    return replace(sequence, params=params)


class _NullModel:
    """Computes nothing: hidden states are zero, and the logits of `tokens` int64 [N] are equal."""

    def __init__(self, facts: ModelConfig, tokens: NDArray[np.int64]) -> None:
        self._hidden = torch.zeros(1, facts.hidden_size)
        self._logits = torch.full((1, facts.vocab_size), _UNLIKELY)
        self._logits[0, torch.from_numpy(tokens)] = 0

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._hidden.expand(batch.input_ids.shape[0], -1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._logits.expand(hidden.shape[0], -1)


class _VocabularyWalk:
    """Draws `tokens` int64 [N] in turn."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self._tokens = tokens
        self._place = 0

    def sample(self, logits: Tensor, state: BatchState, draws: DrawBatch) -> Sampled:
        places = self._place + np.arange(draws.logits_rows.size)
        self._place += places.size
        return Sampled(self._tokens[places % self._tokens.size])
