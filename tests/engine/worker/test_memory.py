"""Device, precision and sizes."""

import logging
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.config.cache import CacheConfig
from octavo.config.load import DType
from octavo.config.model import ModelConfig, RopeConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.core.limits import HostMemory
from octavo.engine.worker import memory
from octavo.engine.worker.memory import CacheDemand, CacheSize, StepLimits, size_cache
from octavo.kernels import ops

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
GIB = 1024**3


def facts(dtype: str) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=10,
        hidden_size=4,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rotary_dim=4),
        windows=(None,),
        max_model_len=64,
        dtype=dtype,  # type: ignore[arg-type]
    )


def demand(**changes: int) -> CacheDemand:
    values = {
        "model_limit": 4096,
        "max_num_seqs": 4,
        "bytes_per_block": 1000,
        "free_bytes": 10_000_000,
        "budget_bytes": 100_000,
    }
    return CacheDemand(**values | changes)


def cache(**values: int) -> CacheConfig:
    return CacheConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_h01_auto_takes_the_checkpoints_precision(name: str) -> None:
    assert memory.resolve_dtype(DType.AUTO, facts(name)) == getattr(torch, name)


@pytest.mark.parametrize(("saved", "warned"), [("bfloat16", True), ("float16", False)])
def test_h01_forced_float16_warns_on_a_bfloat16_checkpoint(
    saved: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert memory.resolve_dtype(DType.FLOAT16, facts(saved)) == torch.float16
    assert ("65504" in caplog.text) == warned


def test_device_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert memory.resolve_device("auto") == CPU
    with pytest.raises(ConfigurationError, match="--device cpu"):
        memory.resolve_device("cuda")


def test_a_gpu_that_torch_cannot_use_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is\ntoo old")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with caplog.at_level(logging.WARNING):
        assert memory.resolve_device("auto", driver=tmp_path / "none") == CPU
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        assert memory.resolve_device("auto", driver=tmp_path) == CPU
    assert "your system is too old" in caplog.text
    with pytest.raises(ConfigurationError, match="your system is too old"):
        memory.resolve_device("cuda")


def test_f17_a_cache_in_fp8_needs_a_gpu_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, auto = (CacheConfig(kv_cache_dtype=name) for name in ("fp8", "auto"))
    assert memory.resolve_cache_dtype(auto, torch.bfloat16, CPU) == torch.bfloat16
    for device, reads in ((CPU, True), (CUDA, False)):
        monkeypatch.setattr(ops, "_gpu_reads_fp8", lambda _, reads=reads: reads)
        with pytest.raises(ConfigurationError, match=r"--kv-cache-dtype fp8 .* use .* auto"):
            memory.resolve_cache_dtype(fp8, torch.bfloat16, device)
    monkeypatch.setattr(ops, "_gpu_reads_fp8", lambda _: True)
    assert memory.resolve_cache_dtype(fp8, torch.bfloat16, CUDA) == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("device", "gib", "given", "expected"),
    [
        (CPU, 0, {}, (128, 2048)),
        (CUDA, 24, {}, (256, 2048)),
        (CUDA, 80, {}, (1024, 8192)),
        (CPU, 0, {"max_num_seqs": 4000}, (4000, 4000)),
        (CPU, 0, {"max_num_batched_tokens": 50}, (50, 50)),
        (CPU, 0, {"max_num_seqs": 8, "max_num_batched_tokens": 64}, (8, 64)),
    ],
)
def test_step_limits_follow_the_device_and_what_is_given(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    gib: int,
    given: dict[str, int],
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(memory, "_gpu_bytes", lambda _: gib * GIB)
    limits = memory.resolve_step_limits(SchedulerConfig(**given), device)  # type: ignore[arg-type]
    assert limits == StepLimits(*expected)


@pytest.mark.parametrize(
    ("token_seconds", "expected"),
    [
        (0.0006, 320),  # 333, to whole blocks
        (0.00001, 2048),
        (0.05, 128),
    ],
)
def test_a_step_on_cpu_has_what_a_prompt_computes_in_a_fifth_of_a_second(
    token_seconds: float, expected: int
) -> None:
    assert memory.pace_steps(StepLimits(16, 2048), token_seconds) == StepLimits(16, expected)


def test_a_paced_step_has_room_for_every_sequence() -> None:
    assert memory.pace_steps(StepLimits(512, 2048), 0.05) == StepLimits(512, 512)


def test_f01_the_context_shrinks_to_what_the_cache_holds(caplog: pytest.LogCaptureFixture) -> None:
    size = size_cache(cache(num_gpu_blocks_override=32), None, demand())
    assert size == CacheSize(32, 512)
    assert "512" in caplog.text


def test_f01_an_explicit_context_beyond_the_cache_names_the_largest() -> None:
    with pytest.raises(ConfigurationError, match=r"--max-model-len 4096 .* is 512\b"):
        size_cache(cache(num_gpu_blocks_override=32), 4096, demand())
    assert size_cache(cache(num_gpu_blocks_override=32), 512, demand()) == CacheSize(32, 512)


def test_f17_an_explicit_context_beyond_the_model_names_the_limit() -> None:
    memory.check_context(4096, 4096)
    memory.check_context(None, 4096)
    with pytest.raises(ConfigurationError, match=r"--max-model-len 4097 .* is 4096\b"):
        memory.check_context(4097, 4096)


def test_the_default_takes_the_budget_but_no_more_than_can_be_used() -> None:
    assert size_cache(cache(), None, demand()).num_blocks == 100
    assert size_cache(cache(), 33, demand(max_num_seqs=2)) == CacheSize(6, 33)


def test_given_bytes_decide_the_blocks() -> None:
    size = size_cache(cache(kv_cache_memory_bytes=5999), None, demand())
    assert size == CacheSize(5, 80)


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ({"kv_cache_memory_bytes": 999}, {}, r"--kv-cache-memory-bytes 999 .* is 1000\b"),
        (
            {"kv_cache_memory_bytes": 20_000_000},
            {},
            r"--kv-cache-memory-bytes 20000000 .* is 10000000\b",
        ),
        (
            {"num_gpu_blocks_override": 10_001},
            {},
            r"--num-gpu-blocks-override 10001 .* is 10000\b",
        ),
        ({}, {"budget_bytes": 10}, "too little memory"),
        ({}, {"budget_bytes": -5}, "too little memory"),
    ],
)
def test_sizes_that_do_not_fit_name_the_flag_and_a_value_that_works(
    given: dict[str, int], changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        size_cache(cache(**given), None, demand(**changes))


def test_the_host_budget_is_a_share_with_a_maximum() -> None:
    assert memory.host_budget(5 * GIB) == 2 * GIB
    assert memory.host_budget(500 * GIB) == 4 * GIB


@pytest.mark.parametrize(("limit", "expected"), [("max", 1024000), ("600000", 400000)])
def test_free_memory_respects_the_container(tmp_path: Path, limit: str, expected: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\nHugePages: 0\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("300000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert memory.free_host_memory(tmp_path / "meminfo", tmp_path) == expected


def test_free_memory_without_a_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1000 kB\n")
    assert memory.free_host_memory(tmp_path / "meminfo", tmp_path / "none") == 1024000
    assert memory.free_host_memory(tmp_path / "none", tmp_path / "none") > 0


@pytest.mark.parametrize(
    ("swap_space", "kv_offload", "free", "most_useful", "expected"),
    [
        (1.0, 0.0, 100 * GIB, 10**6, HostMemory(1024, 0)),
        (1.0, 0.0, 1 * GIB, 10**6, HostMemory(512, 0)),
        (1.0, 0.0, 100 * GIB, 64, HostMemory(64, 0)),
        (1.0, 0.5, 1 * GIB, 10**6, HostMemory(256, 512)),
        (0.0, 2.0, 100 * GIB, 10**6, HostMemory(0, 2048)),
    ],
)
def test_host_memory_is_shared_out_in_blocks(
    swap_space: float, kv_offload: float, free: int, most_useful: int, expected: HostMemory
) -> None:
    config = CacheConfig(swap_space=swap_space, kv_offload=kv_offload)
    assert memory.size_host_memory(config, GIB // 1024, free, most_useful) == expected


def test_an_offload_space_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--kv-offload 2.0 .* is 1.50"):
        memory.size_host_memory(CacheConfig(kv_offload=2.0), 1024, 3 * GIB // 2, 10)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**60, dtype=torch.uint8),
        lambda: bytearray(2**62),
        lambda: mmap.mmap(-1, 2**62),
    ],
    ids=["torch", "python", "system"],
)
def test_an_allocation_that_fails_names_the_model_and_what_takes_less(
    allocate: Callable[[], object],
) -> None:
    wanted = r"^a-model: the memory ran out during the load.* bytes are free.*--quantization int8"
    with (
        pytest.raises(ConfigurationError, match=wanted),
        memory.told_when_memory_runs_out("a-model"),
    ):
        allocate()


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    with (
        pytest.raises(FileNotFoundError),
        memory.told_when_memory_runs_out("a-model"),
    ):
        Path("/none/at/all").read_bytes()
