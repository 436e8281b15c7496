"""Whole models with random weights made on the device: steps through the engine's own loop."""

import gc
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig
from octavo.engine.assembly import engine_limits, launch_of
from octavo.engine.core.messages import AddRequest
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.executor.uniproc import UniprocExecutor
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.loader import Checkpoint
from octavo.loadtest.gpu.shapes import Plan
from octavo.loadtest.offline.ceilings import Ceilings
from octavo.loadtest.offline.model_work import ModelWork


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode steps at one batch size; `share` is that of the time to read weights and cache."""

    batch: int
    step_ms: float
    tokens_per_second: float
    share: float


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """What one model reached; `compiled_late` should be empty."""

    name: str
    parameters: int
    kv_blocks: int
    prefill_tflops: float
    decodes: tuple[Decode, ...]
    compiled_late: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def measure_model(plan: Plan, facts: ModelConfig, ceilings: Ceilings) -> ModelFigures:
    """One model, after all that others before held has been given back."""
    gc.collect()
    if plan.device == "cuda":
        torch.cuda.empty_cache()
    config = EngineConfig.model_validate(
        {
            "load": {"load_format": "dummy", "dtype": plan.dtype},
            "device": {"device": plan.device},
            "cache": {"enable_prefix_caching": False, "swap_space": 0},
            "scheduler": {"max_num_seqs": max(plan.model_batches)},
        }
    )
    checkpoint = Checkpoint(f"random {facts.model_type}", facts, Path(), {}, None)
    executor = UniprocExecutor(config, checkpoint)
    limits = engine_limits(config, checkpoint, executor)
    engine = LLMEngine(config, limits, executor, launch_of(executor))
    work = ModelWork(facts, getattr(torch, plan.dtype).itemsize)
    decodes = []
    for batch in plan.model_batches:
        step = _decode_seconds(engine, plan, batch)
        context = plan.model_prompt + plan.model_output // 2
        num_bytes = work.weight_bytes + batch * work.kv_bytes(context)
        limit = num_bytes / (ceilings.copy_gb * 1e9)
        decodes.append(Decode(batch, step * 1e3, batch / step, limit / step))
    prefill = _prefill_seconds(engine, plan)
    figures = ModelFigures(
        checkpoint.name,
        work.layer_parameters + work.head_parameters,
        executor.num_blocks,
        work.prefill_operations(max(plan.prompts)) / prefill / 1e12,
        tuple(decodes),
        executor.compiled_late,
    )
    engine.shutdown()
    return figures


def _add(engine: LLMEngine, name: str, length: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=0, ignore_eos=True)
    prompt = tuple(token % 89 + 1 for token in range(length))
    engine.add_request(AddRequest(name, prompt, params, 0.0))


def _decode_seconds(engine: LLMEngine, plan: Plan, batch: int) -> float:
    """Mean time of the steps in which all sequences decode."""
    for number in range(batch):
        _add(engine, f"d{number}", plan.model_prompt, plan.model_output)
    num_left = batch
    started, steps = 0.0, 0
    num_begun: set[str] = set()
    while engine.has_work():
        deltas = engine.step()
        ended = sum(delta.finish_reason is not None for delta in deltas)
        if started and num_left == batch and not ended:
            steps += 1
            finished = time.perf_counter()
        num_begun |= {delta.request_id for delta in deltas if delta.token_ids}
        if not started and len(num_begun) == batch:
            started = time.perf_counter()
        num_left -= ended
    return (finished - started) / steps


def _prefill_seconds(engine: LLMEngine, plan: Plan) -> float:
    """Best time to the first token of the longest prompt, which all chunks of it take."""
    best = float("inf")
    for number in range(3):
        started = time.perf_counter()
        _add(engine, f"p{number}", max(plan.prompts), 1)
        while engine.has_work():
            engine.step()
        best = min(best, time.perf_counter() - started)
    return best
