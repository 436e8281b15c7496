"""Serves on a GPU that is not there, and prints what would be compiled after the start.

    TRITON_INTERPRET=0 python tests/support/late_compilations.py FAMILY [eager] [fp8]

Launches are caught where Triton would compile them, so kernels leave what they found: zeros. What
torch does is done, on the CPU, and results are read. Start, scheduler, runner and wrappers are
those of the server. What is compiled late fails, and so does a kind of step that was never served.
"""

import random
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from host_copies import NoHostCopies
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.config.cache import CacheConfig
from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig, RopeConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.engine.attention.metadata import KVCacheLayout
from octavo.engine.core.limits import EngineLimits, HostMemory
from octavo.engine.core.messages import AddRequest
from octavo.engine.core.model_output import Wait
from octavo.engine.core.pooling import Pooling
from octavo.engine.core.request_output import SequenceDelta
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import SchedulerOutput
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

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, NUM_SWAP_BLOCKS, MAX_MODEL_LEN = 16, 640, 2000, 9000
STEPS = StepLimits(max_num_seqs=20, max_num_batched_tokens=512)


class Zeroed(TorchDispatchMode):
    """New memory holds zeros: what a kernel would have written is finite, and always the same."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.zero_() if "empty" in str(func) else out


class Arrived:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._arrays = [tensor.numpy().copy() for tensor in tensors]

    def wait(self) -> list[NDArray[Any]]:
        return self._arrays


class DirectStream:
    """Work is done at once."""

    device = CPU

    def upload(self, words: NDArray[np.int64], into: Tensor) -> Tensor:
        fits = into.shape[0] >= words.size
        target = into[: words.size] if fits else torch.empty(words.size, dtype=torch.int64)
        return target.copy_(torch.from_numpy(words))

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def download(self, sources: Callable[[], Sequence[Tensor]]) -> Arrived:
        return Arrived(sources())

    def new_pool(self) -> None:
        pass

    def capture(self, work: Callable[[], None], pool: None) -> Callable[[], None]:
        with NoHostCopies():
            work()
        return lambda: None  # a recording launches nothing anew

    def synchronize(self) -> None:
        pass


class Executor:
    """Runs steps, and notes what kinds there were."""

    def __init__(self, runner: DeviceRunner) -> None:
        self.num_blocks = NUM_BLOCKS
        self._runner = runner
        self.served: set[str] = set()

    def execute_model(self, plan: SchedulerOutput) -> Any:
        return self.launch(plan)()

    def launch(self, plan: SchedulerOutput) -> Wait:
        for name in ("block_copies", "swap_out", "swap_in"):
            if getattr(plan, name):
                self.served.add(name)
        return self._runner.launch(plan)

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
        rope=RopeConfig(
            rope_type="dynamic", rotary_dim=64, factor=4.0, original_max_position_embeddings=4096
        ),
        windows=((1024 if family == "mistral" else None),) * layers,
        max_model_len=MAX_MODEL_LEN,
        qk_norm=family == "qwen3",
        dtype="bfloat16",
    )


def make_runner(family: str, bounds: Bounds, fp8: bool) -> DeviceRunner:
    known = facts(family)
    model = build_model(known, torch.bfloat16, CPU)
    zeros = [(name, slot.target.zero_()) for name, slot in model._weight_slots()]
    model.load_weights(zeros)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    layout = KVCacheLayout(NUM_BLOCKS, known.num_kv_heads, BLOCK_SIZE, known.head_dim, dtype)
    scale = torch.ones(known.num_kv_heads)
    scales = [(scale, scale)] * known.num_layers if fp8 else None
    cache = KVCache(layout, known.num_layers, CPU, NUM_SWAP_BLOCKS, scales)
    window = known.windows[0]
    limits = RunnerLimits(STEPS.max_num_seqs, MAX_MODEL_LEN, known.vocab_size, (), window)
    return DeviceRunner(model, cache, limits, DirectStream(), bounds)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "top_k": 5, "min_p": 0.1},
    {"logprobs": 3, "top_p": 0.5, "frequency_penalty": 0.5},
    {"prompt_logprobs": 2, "max_tokens": 3},
    {"repetition_penalty": 1.2, "logit_bias": {3: 1.0}, "min_tokens": 2, "stop_token_ids": (9,)},
    {"n": 3, "allowed_token_ids": (0, 2, 3), "bad_words_token_ids": ((5, 6),)},
    {"use_beam_search": True, "n": 2, "best_of": 3, "logprobs": 1, "min_tokens": 2},
    *({"pooling": pooling, "max_tokens": 0} for pooling in Pooling),
]
LENGTHS = [1, 2, 5, 9, 17, 40, 65, 130, 700, 1, 3, 2040, 5000, 8190, 8980, 33, 1, 64, 16, 2048]
CROWD: list[tuple[dict[str, Any], int]] = [({"max_tokens": 160}, 400)] * STEPS.max_num_seqs
WANTED = {
    "block_copies",
    "swap_out",
    "swap_in",
    "tokens",
    "logprobs",
    "prompt_logprobs",
    "embedding",
    "score",
}


def serve(runner: DeviceRunner) -> set[str]:
    """Requests of all kinds and lengths that come and go, steps overlapping; what was served."""
    limits = EngineLimits(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=STEPS.max_num_seqs,
        max_num_batched_tokens=STEPS.max_num_batched_tokens,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        vocab_size=runner.limits.vocab_size,
        eos_token_ids=(),
        host_memory=HostMemory(NUM_SWAP_BLOCKS),
        window=runner.limits.window,
    )
    config = EngineConfig(
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(preemption_mode="swap"),
    )
    executor = Executor(runner)
    engine = LLMEngine(config, limits, executor, executor.launch)
    generator = random.Random(0)
    deltas: list[SequenceDelta] = []
    # Backwards the kinds meet other lengths; those of the crowd outgrow the cache together.
    mixed = zip(cycle(KINDS), LENGTHS + LENGTHS[::-1], strict=False)
    for wave in (mixed, CROWD):
        for kind, length in wave:
            params = SamplingParams(**{"max_tokens": 12, **kind})
            prompt = tuple(generator.randrange(100) for _ in range(length))
            engine.add_request(AddRequest(str(generator.random()), prompt, params, 0.0))
            for _ in range(generator.randrange(4)):
                deltas += engine.step()
        while engine.has_work():
            deltas += engine.step()
    assert not (errors := {delta.error for delta in deltas} - {None}), errors
    return executor.served | results(deltas)


def results(deltas: Sequence[SequenceDelta]) -> set[str]:
    return {
        name
        for delta in deltas
        for name, there in (
            ("tokens", delta.token_ids),
            ("logprobs", delta.logprobs),
            ("prompt_logprobs", delta.prompt_logprobs),
            ("embedding", delta.embedding is not None),
            ("score", delta.score is not None),
        )
        if there
    }


def main(family: str, options: list[str]) -> int:
    ops._backend = ops._device_backend = lambda x: triton  # type: ignore[assignment]
    ops._draws = lambda logits: ops.sampling  # type: ignore[assignment,return-value]
    bounds = Bounds(STEPS.max_num_batched_tokens, MAX_MODEL_LEN)
    sizes = GpuStart.sizes_for(STEPS.max_num_seqs, enforce_eager="eager" in options)
    launches: list[Launch] = []
    with caught(TARGETS["sm_90"], launches), Zeroed():
        runner = make_runner(family, bounds, "fp8" in options)
        warm_up_first_steps(runner, BLOCK_SIZE)
        GpuStart(None, STEPS, BLOCK_SIZE, bounds, sizes).prepare(runner)  # type: ignore[arg-type]
        prepared = {launch.key for launch in launches}
        launches.clear()
        served = serve(runner)
    late = {launch.key for launch in launches} - prepared
    sys.stdout.write(f"{len(prepared)} prepared, {len(launches)} launches\n")
    sys.stdout.writelines(f"late: {key}\n" for key in sorted(late))
    sys.stdout.writelines(f"never served: {kind}\n" for kind in sorted(WANTED - served))
    return 1 if late or WANTED - served else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
