"""A synchronous engine over the simulated executor, and what to ask of it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from simulated_model import SimulatedExecutor

from octavo.config.cache import CacheConfig
from octavo.config.engine import EngineConfig
from octavo.config.load import LoadConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.engine.core.limits import HostMemory
from octavo.engine.core.messages import AddRequest
from octavo.engine.core.request_output import SequenceDelta
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.llm_engine import EngineLimits, LLMEngine

VOCAB_SIZE = 1000


@dataclass
class Choice:
    """All that came out for one choice."""

    deltas: list[SequenceDelta] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def finish_reason(self) -> str | None:
        return self.deltas[-1].finish_reason if self.deltas else None


@dataclass
class Sizes:
    """Small limits; a test names those that it depends on."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    max_model_len: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    host_memory: HostMemory = field(default_factory=HostMemory)
    window: int | None = None


class Harness:
    """Feeds an engine, collects its deltas per choice and checks it after each step."""

    def __init__(
        self,
        sizes: Sizes | None = None,
        *,
        seed: int | None = None,
        prefix_caching: bool = True,
        overlap: bool = False,
        **scheduler: Any,
    ) -> None:
        sizes = sizes or Sizes()
        self.limits = EngineLimits(
            max_model_len=sizes.max_model_len or sizes.num_blocks * sizes.block_size,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=sizes.eos_token_ids,
            host_memory=sizes.host_memory,
            window=sizes.window,
        )
        self.executor = SimulatedExecutor(
            sizes.num_blocks,
            sizes.block_size,
            sizes.max_num_seqs,
            VOCAB_SIZE,
            sizes.eos_token_ids,
            sizes.window,
        )
        config = EngineConfig(
            load=LoadConfig(seed=seed),
            cache=CacheConfig(block_size=sizes.block_size, enable_prefix_caching=prefix_caching),
            scheduler=SchedulerConfig(**scheduler),
        )
        self.engine = LLMEngine(
            config, self.limits, self.executor, self.executor.launch if overlap else None
        )
        self.choices: dict[tuple[str, int], Choice] = defaultdict(Choice)

    def add(self, request_id: str, prompt: Sequence[int], **options: Any) -> SamplingParams:
        """Queue a greedy request; `options` are sampling parameters, priority or cache_salt."""
        around = {key: options.pop(key) for key in ("priority", "cache_salt") if key in options}
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **options})
        self.engine.add_request(AddRequest(request_id, tuple(prompt), params, 0.0, **around))
        return params

    def step(self) -> list[SequenceDelta]:
        deltas = self.engine.step()
        self.engine.check_integrity()
        for delta in deltas:
            choice = self.choices[delta.request_id, delta.index]
            assert choice.finish_reason is None, f"{delta} after the terminal delta"
            choice.deltas.append(delta)
        return deltas

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left, then check that nothing is held."""
        for _ in range(max_steps):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work(), "requests are left"
        stats = self.engine.stats()
        assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.num_used_swap_blocks == 0
        assert all(choice.finish_reason is not None for choice in self.choices.values())
        assert not self.engine._kv_cache._tables, "a block table outlived its sequence"

    def text(self, request_id: str, index: int = 0) -> list[int]:
        return self.choices[request_id, index].token_ids

    def reason(self, request_id: str, index: int = 0) -> str | None:
        return self.choices[request_id, index].finish_reason

    @property
    def plan(self) -> SchedulerOutput:
        """The plan of the last step."""
        return self.executor.plans[-1]

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(seq_id, number of tokens) of the last step, in order."""
        return [(item.seq_id, item.num_tokens) for item in self.plan.scheduled]
