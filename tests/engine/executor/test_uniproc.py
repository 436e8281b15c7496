"""The executor, from a checkpoint on disk to sampled ids."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_stream import FakeStream
from paged_driver import PagedDriver
from torch import Tensor
from transformers import AutoModelForCausalLM

from octavo.config.engine import EngineConfig
from octavo.config.load import LoadConfig
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.core.limits import HostMemory
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import NewSequence, ScheduledSequence, SchedulerOutput
from octavo.engine.executor import uniproc
from octavo.engine.executor.gpu import GpuStart
from octavo.engine.executor.uniproc import UniprocExecutor, check_int8
from octavo.engine.loader import resolve_checkpoint
from octavo.engine.loader.filling import load_model
from octavo.engine.worker.device_runner import DeviceRunner
from octavo.engine.worker.sampler import NOT_FINITE
from octavo.kernels import ops


def make_executor(directory: Path, **parts: dict[str, Any]) -> UniprocExecutor:
    load = {"model": str(directory), **parts.pop("load", {})}
    device = {"device": "cpu", **parts.pop("device", {})}
    config = EngineConfig.model_validate({"load": load, "device": device, **parts})
    return UniprocExecutor(config, resolve_checkpoint(config.load))


def run(executor: UniprocExecutor, prompt: list[int]) -> list[ModelOutput]:
    """One prompt and ten decode steps."""
    params = SamplingParams(max_tokens=50, temperature=0)
    new = NewSequence(1, 0, tuple(prompt), len(prompt), 0, (3, 1, 2), params, 0)
    first = ScheduledSequence(1, len(prompt), 0, (), True)
    outputs = [executor.execute_model(SchedulerOutput(0, (new,), (first,), (), ()))]
    step = ScheduledSequence(1, 1, 0, (), True)
    plan = SchedulerOutput(0, (), (step,), (), ())
    return outputs + [executor.execute_model(plan) for _ in range(10)]


def test_greedy_ids_equal_transformers(random_llama_dir: Path) -> None:
    executor = make_executor(random_llama_dir, cache={"num_gpu_blocks_override": 8})
    prompt = [5, 250, 17, 99, 300]
    produced = [output.sampled[1][0] for output in run(executor, prompt)]
    executor.shutdown()
    model = AutoModelForCausalLM.from_pretrained(random_llama_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + produced])).logits[0]
    assert produced == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_int8_weights_are_the_same_from_step_to_step(random_llama_dir: Path) -> None:
    executor = make_executor(
        random_llama_dir,
        load={"quantization": "int8"},
        cache={"num_gpu_blocks_override": 8},
    )
    prompt = [5, 250, 17, 99, 300]
    produced = [output.sampled[1][0] for output in run(executor, prompt)]
    executor.shutdown()
    with ops.int8_weights():
        config = LoadConfig(model=str(random_llama_dir))
        model = load_model(resolve_checkpoint(config), torch.float32, torch.device("cpu"))
    logits = PagedDriver(model).prefill(0, prompt + produced)
    assert produced == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_int8_weights_need_the_kernels(
    random_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.cpu, "can_quantize", lambda dtype: False)
    with pytest.raises(ConfigurationError, match="--quantization int8 needs the CPU's own kernels"):
        make_executor(random_llama_dir, load={"quantization": "int8"})


def test_f17_a_cache_in_fp8_is_refused_on_cpu(random_llama_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="--kv-cache-dtype fp8 is not supported on this"):
        make_executor(random_llama_dir, cache={"kv_cache_dtype": "fp8"})


def test_a_cache_in_fp8_holds_four_times_the_tokens_of_float32(
    random_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a GPU would do, with plain torch on this one.
    parts = {"cache": {"kv_cache_memory_bytes": 100_000}}
    with ops.reference_only():
        plain = make_executor(random_llama_dir, **parts)
        monkeypatch.setattr(uniproc, "resolve_cache_dtype", lambda *_: torch.float8_e4m3fn)
        executor = make_executor(random_llama_dir, **parts)
        assert executor.num_blocks // 4 == plain.num_blocks
        produced = [output.sampled[1][0] for output in run(executor, [5, 250, 17, 99, 300])]
        expected = [output.sampled[1][0] for output in run(plain, [5, 250, 17, 99, 300])]
    # Rounded to 4 bits the cache gives other logits, and the first tokens all the same.
    assert produced[0] == expected[0]
    for each in (plain, executor):
        each.shutdown()


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_packs_every_layer_for_fixed_shapes(
    random_llama_dir: Path, deterministic: bool
) -> None:
    parts = {"load": {"model": str(random_llama_dir)}, "device": {"deterministic": deterministic}}
    config = EngineConfig.model_validate(parts)
    with ops.reference_only():
        model = uniproc._load(
            config, resolve_checkpoint(config.load), torch.float32, torch.device("cpu")
        )
    linears = [model.lm_head]
    for layer in model.layers:
        linears += [layer.self_attn.qkv, layer.self_attn.out, layer.mlp.gate_up, layer.mlp.down]
    assert all((linear.loaded().in_slices is not None) == deterministic for linear in linears)


def test_int8_weights_are_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigurationError, match=r"int8 is not supported on cuda.*--device cpu"):
        check_int8(torch.bfloat16, torch.device("cuda"))


def test_sizes_are_resolved(random_llama_dir: Path) -> None:
    executor = make_executor(random_llama_dir)
    assert (executor.max_num_seqs, executor.max_num_batched_tokens) == (128, 2048)
    assert executor.max_model_len == 512
    # 512 tokens are 32 blocks: more than that for each of the 128 sequences is never used.
    assert executor.num_blocks == 128 * 32


def test_f01_a_small_cache_limits_the_context(random_llama_dir: Path) -> None:
    small = {"num_gpu_blocks_override": 4}
    assert make_executor(random_llama_dir, cache=small).max_model_len == 64
    with pytest.raises(ConfigurationError, match=r"--max-model-len 100 .* is 64\b"):
        make_executor(random_llama_dir, cache=small, load={"max_model_len": 100})


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_smallest_cache_that_can_be_asked_for_starts(
    random_llama_dir: Path, block_size: int
) -> None:
    cache = {"num_gpu_blocks_override": 1, "block_size": block_size}
    executor = make_executor(random_llama_dir, cache=cache, scheduler={"max_num_seqs": 1})
    assert executor.max_model_len == block_size


def test_f17_a_context_beyond_the_model_is_refused_before_loading(random_llama_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--max-model-len 513 .* is 512\b"):
        make_executor(random_llama_dir, load={"max_model_len": 513})


def test_h01_an_overflow_in_float16_fails_the_request_and_bfloat16_does_not(
    random_llama_dir: Path,
) -> None:
    checkpoint = resolve_checkpoint(LoadConfig(model=str(random_llama_dir)))
    read = checkpoint.weights
    assert read is not None

    def scaled() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read():
            yield name, tensor * 1e5 if "down_proj" in name else tensor

    checkpoint = replace(checkpoint, weights=scaled)
    for dtype, failed in (("float16", {1: NOT_FINITE}), ("bfloat16", {})):
        config = EngineConfig.model_validate(
            {
                "load": {"dtype": dtype},
                "cache": {"num_gpu_blocks_override": 8},
                "device": {"device": "cpu"},
            }
        )
        assert run(UniprocExecutor(config, checkpoint), [5, 250, 17])[0].failed == failed


def test_host_memory_is_there_and_its_costs_are_measured(random_llama_dir: Path) -> None:
    executor = make_executor(
        random_llama_dir, cache={"num_gpu_blocks_override": 64, "kv_offload": 0.001}
    )
    host = executor.host_memory
    assert host.num_swap_blocks == 128 * 32 and host.num_offload_blocks > 0
    assert host.costs is not None and host.costs.compute_token > 0 < host.costs.copy_block
    without = make_executor(
        random_llama_dir, cache={"num_gpu_blocks_override": 64, "swap_space": 0}
    )
    assert without.host_memory == HostMemory()


class RoomyMemory:
    """A GPU of 64 MiB of which nothing is taken."""

    def free_and_total(self) -> tuple[int, int]:
        return 64 << 20, 64 << 20

    def allocated(self) -> int:
        return 0

    peak = reserved = allocated

    def release(self) -> None:
        pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStream]:
    """A start takes the way of a GPU, over a stand-in."""
    stream = FakeStream()
    monkeypatch.setattr(uniproc, "device_stream", lambda _: stream)
    monkeypatch.setattr(uniproc, "CudaMemory", lambda _: RoomyMemory())
    yield stream
    gc.unfreeze()


GPU_SIZES: dict[str, dict[str, Any]] = {
    "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 32},
    "cache": {"kv_cache_memory_bytes": 1 << 20, "swap_space": 0},
}


def test_a_start_on_a_gpu_leads_to_steps_that_equal_transformers(
    random_llama_dir: Path, gpu: FakeStream
) -> None:
    # The CPU's kernels leave nothing that could be recorded.
    executor = make_executor(random_llama_dir, device={"enforce_eager": True}, **GPU_SIZES)
    prompt = [5, 250, 17, 99, 300]
    produced = [output.sampled[1][0] for output in run(executor, prompt)]
    model = AutoModelForCausalLM.from_pretrained(random_llama_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + produced])).logits[0]
    assert produced == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_start_on_a_gpu_records_decodes_and_lets_steps_overlap(
    random_llama_dir: Path, gpu: FakeStream
) -> None:
    executor = make_executor(random_llama_dir, **GPU_SIZES)
    assert executor.launch is not None
    gpu.num_replays = 0
    run(executor, [5, 250, 17, 99, 300])
    assert gpu.num_replays == 2 * 10


@pytest.mark.parametrize(("step_tokens", "measured"), [(32, 32), (4096, 2048)])
def test_a_gpu_is_measured_on_a_prompt_that_fills_it_once_all_is_compiled(
    random_llama_dir: Path,
    gpu: FakeStream,
    monkeypatch: pytest.MonkeyPatch,
    step_tokens: int,
    measured: int,
) -> None:
    happened: list[object] = []

    def measure(runner: DeviceRunner, num_tokens: int) -> float:
        happened.append(num_tokens)
        return 0.001

    monkeypatch.setattr(uniproc, "measure_prefill", measure)
    monkeypatch.setattr(GpuStart, "prepare", lambda *_: happened.append("prepared"))
    executor = make_executor(
        random_llama_dir,
        scheduler={"max_num_seqs": 2, "max_num_batched_tokens": step_tokens},
        cache={"kv_cache_memory_bytes": 1 << 20, "swap_space": 0.001},
    )
    assert happened == ["prepared", measured]
    assert executor.host_memory.costs is not None
    assert executor.host_memory.costs.compute_token == 0.001


def test_what_a_gpu_held_is_given_back(random_llama_dir: Path, gpu: FakeStream) -> None:
    executor = make_executor(random_llama_dir, **GPU_SIZES)
    runner = executor._runner
    held = [weakref.ref(part) for part in (runner, runner._step._model, runner.kv_cache)]
    del runner
    executor.shutdown()
    assert [part() for part in held] == [None] * 3


def test_nothing_is_given_back_to_a_gpu_that_is_lost(
    random_llama_dir: Path, gpu: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    lost: list[object] = []
    monkeypatch.setattr(uniproc, "_lost", lost)
    executor = make_executor(random_llama_dir, **GPU_SIZES)
    runner = executor._runner
    monkeypatch.setattr(gpu, "synchronize", fail)
    executor.shutdown()
    assert lost == [runner]


def test_f17_a_gpu_that_is_full_at_the_warm_up_names_a_cache_that_fits(
    random_llama_dir: Path, gpu: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GpuStart, "prepare", fail)
    with pytest.raises(ConfigurationError, match=r"weights 0\.00.*--kv-cache-memory-bytes \d{6} "):
        make_executor(random_llama_dir, **GPU_SIZES)


def test_f17_weights_that_do_not_fit_are_told(
    random_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. If reserved ...")

    monkeypatch.setattr(uniproc, "load_model", fail)
    with pytest.raises(ConfigurationError, match=r"do not fit .*Tried to allocate 2 GiB\.\)"):
        make_executor(random_llama_dir)
