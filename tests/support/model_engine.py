"""A synchronous engine over a real model in fp32 on CPU, with small sizes."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from fake_stream import FakeStream

from octavo.config.cache import CacheConfig
from octavo.config.engine import EngineConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.engine.attention.metadata import KVCacheLayout
from octavo.engine.core.limits import EngineLimits
from octavo.engine.core.messages import AddRequest
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.request_output import SequenceDelta
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.models.decoder import CausalLM
from octavo.engine.worker.device_runner import DeviceRunner
from octavo.engine.worker.device_step import Bounds
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import RunnerLimits
from octavo.engine.worker.model_runner import ModelRunner

CPU = torch.device("cpu")


class RunnerExecutor:
    """Runs steps on a runner, and keeps the plans."""

    def __init__(self, runner: ModelRunner | DeviceRunner, kv_cache: KVCache) -> None:
        self.runner = runner
        self.kv_cache = kv_cache
        self.plans: list[SchedulerOutput] = []

    @property
    def num_blocks(self) -> int:
        return self.kv_cache.layout.num_blocks

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        self.plans.append(plan)
        return self.runner.execute(plan)

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelOutput]:
        self.plans.append(plan)
        return self.runner.launch(plan)

    def shutdown(self) -> None:
        pass


class ModelEngine:
    """An engine; `limits` overrides sizes, `cache` and `scheduler` the configuration.

    With a `stream` steps run on it, each launched before the results of the one before are there
    unless `overlap` is False, and decodes as recordings of the numbers of rows in `graphs`.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int = 64,
        eos_token_ids: tuple[int, ...] = (),
        cache: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
        stream: FakeStream | None = None,
        overlap: bool = True,
        graphs: tuple[int, ...] = (),
        cache_dtype: torch.dtype = torch.float32,
        **limits: Any,
    ) -> None:
        facts, block_size = model.config, 4
        layout = KVCacheLayout(
            num_blocks, facts.num_kv_heads, block_size, facts.head_dim, cache_dtype
        )
        self.limits = EngineLimits(
            **{
                "max_model_len": min(facts.max_model_len, num_blocks * block_size),
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "num_blocks": num_blocks,
                "block_size": block_size,
                "vocab_size": facts.vocab_size,
                "eos_token_ids": eos_token_ids,
                **limits,
            }
        )
        runner_limits = RunnerLimits(
            self.limits.max_num_seqs,
            self.limits.max_model_len,
            facts.vocab_size,
            eos_token_ids,
            self.limits.window,
        )
        host = self.limits.host_memory
        kv_cache = KVCache(
            layout,
            facts.num_layers,
            CPU,
            host.num_swap_blocks + host.num_offload_blocks,
            None if cache_dtype == torch.float32 else model.cache_scales(),
        )
        runner: ModelRunner | DeviceRunner
        if stream is None:
            runner = ModelRunner(model, kv_cache, runner_limits, CPU)
        else:
            bounds = Bounds(self.limits.max_num_batched_tokens, self.limits.max_model_len)
            runner = DeviceRunner(model, kv_cache, runner_limits, stream, bounds)
            if graphs:
                runner.record(list(graphs))
        self.executor = RunnerExecutor(runner, kv_cache)
        config = EngineConfig(
            cache=CacheConfig(block_size=block_size, **(cache or {})),
            scheduler=SchedulerConfig(**(scheduler or {})),
        )
        launch = self.executor.launch if stream is not None and overlap else None
        self.engine = LLMEngine(config, self.limits, self.executor, launch)
        self.deltas: dict[tuple[str, int], list[SequenceDelta]] = defaultdict(list)

    def add(self, request_id: str, prompt: list[int], **options: Any) -> None:
        params = SamplingParams(**{"temperature": 0.0, **options})
        self.engine.add_request(AddRequest(request_id, tuple(prompt), params, 0.0))

    def run(self) -> None:
        while self.engine.has_work():
            self.step()
        assert self.engine.stats().num_used_blocks == 0

    def step(self) -> None:
        for delta in self.engine.step():
            self.deltas[delta.request_id, delta.index].append(delta)
        self.engine.check_integrity()

    def text(self, request_id: str, index: int = 0) -> list[int]:
        return [token for delta in self.deltas[request_id, index] for token in delta.token_ids]

    def result(self, request_id: str, index: int = 0) -> SequenceDelta:
        """The one delta of a choice that carries tokens: that of a beam search."""
        *before, last = self.deltas[request_id, index]
        assert not any(delta.token_ids for delta in before)
        return last
