"""An engine in this process, with or without a model, and a run of requests through it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.config.cache import CacheConfig
from octavo.config.device import DeviceConfig
from octavo.config.engine import EngineConfig
from octavo.config.load import DType, LoadConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.engine.assembly import engine_limits, launch_of, make_executor
from octavo.engine.core.messages import AddRequest
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.loader import Checkpoint, resolve_checkpoint
from octavo.loadtest.workload import Prompt, Vocabulary

# Ids below are control tokens and single bytes in the usual vocabularies.
_FIRST_WORD_ID = 1000


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which model is run, in which precision; without `weights` none is, only block counts."""

    name: str | None = None
    dtype: DType = DType.AUTO
    weights: bool = True

    def checkpoint(self) -> Checkpoint:
        """The checkpoint. Raises ConfigurationError where there is none, or none of texts."""
        checkpoint = resolve_checkpoint(self._load_config(None))
        if not isinstance(checkpoint, Checkpoint):
            raise ValueError(f"{checkpoint.name} makes no texts")
        return checkpoint

    def vocabulary(self) -> Vocabulary:
        """Ids to make prompts of."""
        size = self.checkpoint().vocab_size
        return Vocabulary(range(_FIRST_WORD_ID if size > 2 * _FIRST_WORD_ID else 0, size))

    def engine_config(
        self, cache: CacheConfig, steps: SchedulerConfig, length: int
    ) -> EngineConfig:
        """The whole configuration, for contexts up to `length` tokens."""
        return EngineConfig(
            load=self._load_config(length), cache=cache, scheduler=steps, device=DeviceConfig()
        )

    def _load_config(self, length: int | None) -> LoadConfig:
        return LoadConfig(
            model=self.name,
            dtype=self.dtype,
            load_format="auto" if self.weights else "null",
            max_model_len=length,
        )


@dataclass(frozen=True, slots=True)
class CacheShape:
    """A cache for `num_tokens` tokens, and the longest context in it."""

    num_tokens: int
    max_model_len: int
    block_size: int = 16
    caching: bool = True
    max_num_seqs: int | None = None


def make_engine(choice: ModelChoice, shape: CacheShape) -> LLMEngine:
    """An engine that is ready to run. Raises ConfigurationError for what does not fit."""
    checkpoint = choice.checkpoint()
    cache = CacheConfig(
        block_size=shape.block_size,
        num_gpu_blocks_override=shape.num_tokens // shape.block_size,
        enable_prefix_caching=shape.caching,
        swap_space=0,
    )
    steps = SchedulerConfig(max_num_seqs=shape.max_num_seqs)
    config = choice.engine_config(cache, steps, shape.max_model_len)
    executor = make_executor(config, checkpoint)
    return LLMEngine(
        config, engine_limits(config, checkpoint, executor), executor, launch_of(executor)
    )


@dataclass(slots=True)
class Run:
    """What one run took and gave.

    `seconds` is wall clock, `host_seconds` the processor time of this thread alone: scheduling and
    bookkeeping where no model is run, whatever else the machine does.
    """

    seconds: float = 0.0
    host_seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def output_rate(self) -> float:
        """Generated tokens per second."""
        return self.num_output_tokens / self.seconds

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came from the prefix cache."""
        return self.num_cached_tokens / self.num_prompt_tokens


Observer = Callable[[LLMEngine], None]


def run(
    engine: LLMEngine,
    prompts: Sequence[Prompt],
    observe: Observer = lambda engine: None,
    sampling: Mapping[str, Any] | None = None,
) -> Run:
    """Send all prompts at once and step until they are answered; `observe` looks after each step.

    Every text has its full length, whatever ends it otherwise.
    """
    for number, prompt in enumerate(prompts):
        params = {"temperature": 0.0, "ignore_eos": True, **(sampling or {})}
        assert isinstance(prompt.content, list)
        engine.add_request(
            AddRequest(
                f"r{number}",
                tuple(prompt.content),
                SamplingParams(max_tokens=prompt.output_len, **params),
                time.monotonic(),
            )
        )
    result = Run(num_prompt_tokens=sum(prompt.input_len for prompt in prompts))
    begin, host_begin = time.perf_counter(), time.thread_time()
    while engine.has_work():
        for delta in engine.step():
            result.num_output_tokens += len(delta.token_ids)
            if delta.finish_reason is not None and delta.index == 0:
                result.num_cached_tokens += delta.num_cached_tokens
        observe(engine)
    result.seconds = time.perf_counter() - begin
    result.host_seconds = time.thread_time() - host_begin
    return result
