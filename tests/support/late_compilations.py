"""Serves on a GPU that is not there, and prints what would be compiled after the start.

    TRITON_INTERPRET=0 python tests/support/late_compilations.py FAMILY [eager] [fp8]

Tensors have shapes and no memory, so a step computes nothing; its launches are caught where Triton
would compile them. Start, scheduler, runner and wrappers are those of the server.
"""

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.config.cache import CacheConfig
from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig, RopeConfig
from octavo.engine.attention.metadata import KVCacheLayout
from octavo.engine.core.limits import EngineLimits
from octavo.engine.core.messages import AddRequest
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.executor.gpu import GpuStart
from octavo.engine.executor.uniproc import warm_up_first_steps
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.models.registry import build_model
from octavo.engine.worker.device_runner import DeviceRunner
from octavo.engine.worker.device_step import Bounds
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import RunnerLimits
from octavo.engine.worker.memory import StepLimits
from octavo.kernels import ops, triton
from octavo.kernels.triton.resources import TARGETS, Launch, caught

META = torch.device("meta")
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 4000, 9000
STEPS = StepLimits(max_num_seqs=20, max_num_batched_tokens=512)


class Arrived:
    """Every number of every result is 1, so each step draws id 1 and none fails."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tuple(tensor.shape) for tensor in tensors]

    def wait(self) -> list[NDArray[Any]]:
        return [np.ones(shape, np.int64) for shape in self._shapes]


class MetaStream:
    """Work is done at once, on nothing."""

    device = META

    def upload(self, words: NDArray[np.int64], into: Tensor) -> Tensor:
        fits = into.shape[0] >= words.size
        return into[: words.size] if fits else torch.empty(words.size, dtype=torch.int64).to(META)

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def download(self, sources: Callable[[], Sequence[Tensor]]) -> Arrived:
        return Arrived(sources())

    def new_pool(self) -> None:
        pass

    def capture(self, work: Callable[[], None], pool: None) -> Callable[[], None]:
        work()
        return lambda: None  # a recording launches nothing anew

    def synchronize(self) -> None:
        pass


class Executor:
    def __init__(self, runner: DeviceRunner) -> None:
        self.num_blocks = NUM_BLOCKS
        self.execute_model = runner.execute

    def shutdown(self) -> None:
        pass


def facts(family: str) -> ModelConfig:
    layers = 2
    return ModelConfig(
        model_type=family,
        vocab_size=515,
        hidden_size=64,
        intermediate_size=96,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rotary_dim=64),
        windows=((1024 if family == "mistral" else None),) * layers,
        max_model_len=MAX_MODEL_LEN,
        qk_norm=family == "qwen3",
        dtype="bfloat16",
    )


def make_runner(family: str, bounds: Bounds, fp8: bool) -> DeviceRunner:
    known = facts(family)
    model = build_model(known, torch.bfloat16, META)
    model.load_weights([(name, slot.target) for name, slot in model._weight_slots()])
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    layout = KVCacheLayout(NUM_BLOCKS, known.num_kv_heads, BLOCK_SIZE, known.head_dim, dtype)
    scale = torch.empty(known.num_kv_heads, device=META)
    scales = [(scale, scale)] * known.num_layers if fp8 else None
    cache = KVCache(layout, known.num_layers, META, scales=scales)
    window = known.windows[0]
    limits = RunnerLimits(STEPS.max_num_seqs, MAX_MODEL_LEN, known.vocab_size, (), window)
    return DeviceRunner(model, cache, limits, MetaStream(), bounds)


def serve(runner: DeviceRunner) -> None:
    """Requests of all kinds and lengths that come and go, steps overlapping."""
    limits = EngineLimits(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=STEPS.max_num_seqs,
        max_num_batched_tokens=STEPS.max_num_batched_tokens,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        vocab_size=runner.limits.vocab_size,
        eos_token_ids=(),
        window=runner.limits.window,
    )
    config = EngineConfig(cache=CacheConfig(block_size=BLOCK_SIZE))
    engine = LLMEngine(config, limits, Executor(runner), runner.launch)
    generator = random.Random(0)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1, "top_k": 5, "min_p": 0.1},
        {"logprobs": 3, "top_p": 0.5, "frequency_penalty": 0.5},
        {
            "repetition_penalty": 1.2,
            "logit_bias": {3: 1.0},
            "min_tokens": 2,
            "stop_token_ids": (9,),
        },
        {"n": 3, "allowed_token_ids": (1, 2, 3), "bad_words_token_ids": ((5, 6),)},
    ]
    lengths = [1, 2, 5, 9, 17, 40, 65, 130, 700, 1, 3, 2040, 5000, 8190, 8980, 33, 1, 64, 16, 2048]
    for number, length in enumerate(lengths * 2):
        params = SamplingParams(**{"max_tokens": 12, **kinds[number % len(kinds)]})
        prompt = tuple(generator.randrange(100) for _ in range(length))
        engine.add_request(AddRequest(str(number), prompt, params, 0.0))
        for _ in range(generator.randrange(4)):
            engine.step()
    while engine.has_work():
        engine.step()


def main(family: str, options: list[str]) -> int:
    ops._backend = ops._device_backend = lambda x: triton  # type: ignore[assignment]
    bounds = Bounds(STEPS.max_num_batched_tokens, MAX_MODEL_LEN)
    sizes = GpuStart.sizes_for(STEPS.max_num_seqs, enforce_eager="eager" in options)
    launches: list[Launch] = []
    with caught(TARGETS["sm_90"], launches):
        runner = make_runner(family, bounds, "fp8" in options)
        warm_up_first_steps(runner, BLOCK_SIZE)
        GpuStart(None, STEPS, BLOCK_SIZE, bounds, sizes).prepare(runner)  # type: ignore[arg-type]
        prepared = {launch.key for launch in launches}
        launches.clear()
        serve(runner)
    late = {launch.key for launch in launches} - prepared
    sys.stdout.write(f"{len(prepared)} prepared, {len(launches)} launches\n")
    sys.stdout.writelines(f"late: {key}\n" for key in sorted(late))
    return 1 if late or not launches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
