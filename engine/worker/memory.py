"""Device, precision and sizes, settled once at start from the configuration and the machine."""

import logging
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from octavo.config.cache import CacheConfig
from octavo.config.load import DType
from octavo.config.model import ModelConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.engine.core.errors import ConfigurationError, is_out_of_memory
from octavo.engine.core.limits import HostMemory
from octavo.engine.worker.device_memory import MemorySum
from octavo.kernels import ops

_logger = logging.getLogger(__name__)

_GIB = 1024**3
_LARGE_GPU_BYTES = 70 * _GIB
# On CPU the cache takes this share of the free memory, up to the maximum; the rest is for the
# activations, the operating system and the neighbours.
_HOST_SHARE = 0.4
_HOST_MAXIMUM = 4 * _GIB
# Most of what is free that the swap space takes, which is asked for by default.
_SWAP_SHARE = 0.5
# Of a step on a CPU, whose size nobody has asked for.
_STEP_SECONDS = 0.2
_LEAST_STEP_TOKENS = 128
_STEP_TOKENS_UNIT = 16


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Most sequences and most tokens in one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Blocks of the cache and the longest context they and the checkpoint allow."""

    num_blocks: int
    max_model_len: int


def resolve_device(name: str, driver: Path = Path("/proc/driver/nvidia")) -> torch.device:
    """The device for `name` (auto, cpu or cuda); ConfigurationError when it is not there.

    `driver` is where Linux shows a driver for GPUs of NVIDIA.
    """
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if name == "cuda":
        raise ConfigurationError(
            f"--device cuda: no usable GPU was found ({_why_no_gpu()}); use --device cpu"
        )
    if driver.exists():
        _logger.warning("there is a GPU, but the CPU serves: %s", _why_no_gpu())
    return torch.device("cpu")


def _why_no_gpu() -> str:
    """What torch says, as of a driver that is too old for it."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return " ".join(str(error).split())
    return "torch sees no device"


def resolve_dtype(wanted: DType, model_config: ModelConfig) -> torch.dtype:
    """The precision of weights and activations; auto is that of the checkpoint."""
    name = model_config.dtype if wanted is DType.AUTO else wanted.value
    if name == "float16" and model_config.dtype == "bfloat16":
        _logger.warning(
            "--dtype float16 on a bfloat16 checkpoint: values above 65504 overflow and make "
            "requests fail; --dtype bfloat16 has the range that the model was trained with"
        )
    dtypes = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    return dtypes[name]


def resolve_cache_dtype(
    cache: CacheConfig, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """The precision of the KV cache; ConfigurationError where the device has no kernels for it."""
    check_cache_dtype(cache, device)
    return dtype if cache.kv_cache_dtype == "auto" else torch.float8_e4m3fn


def check_cache_dtype(cache: CacheConfig, device: torch.device) -> None:
    """Refuses a precision of the cache that `device` has no kernels for; ConfigurationError."""
    if cache.kv_cache_dtype == "fp8" and not ops.reads_fp8(device):
        raise ConfigurationError(
            f"--kv-cache-dtype fp8 is not supported on this device ({device.type}): it needs a GPU "
            "that converts e4m3 (NVIDIA from sm_89, AMD from gfx942); use --kv-cache-dtype auto"
        )


def resolve_step_limits(config: SchedulerConfig, device: torch.device) -> StepLimits:
    """The limits of a step; what is not given follows from the device, and from what is."""
    large = device.type == "cuda" and _gpu_bytes(device) >= _LARGE_GPU_BYTES
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    default_seqs = 128 if device.type == "cpu" else 1024 if large else 256
    default_tokens = 8192 if large else 2048
    if tokens is None:
        tokens = max(default_tokens, seqs or 0)
    return StepLimits(seqs or min(default_seqs, tokens), tokens)


def pace_steps(steps: StepLimits, token_seconds: float) -> StepLimits:
    """`steps` with no more tokens than a prompt computes in `_STEP_SECONDS`, or than rows pay off.

    A chunk of a prompt holds up every stream. Where products wait for the processor and not for
    memory, larger chunks would gain nothing for it.
    """
    least = max(_LEAST_STEP_TOKENS, steps.max_num_seqs)
    tokens = int(_STEP_SECONDS / token_seconds) // _STEP_TOKENS_UNIT * _STEP_TOKENS_UNIT
    return replace(
        steps, max_num_batched_tokens=min(steps.max_num_batched_tokens, max(least, tokens))
    )


def check_context(max_model_len: int | None, model_limit: int) -> None:
    """Refuses an explicit context beyond the checkpoint's; ConfigurationError."""
    if max_model_len is not None and max_model_len > model_limit:
        raise ConfigurationError(
            f"--max-model-len {max_model_len} is above the model's limit; "
            f"the largest value that works is {model_limit}"
        )


@dataclass(frozen=True, slots=True)
class CacheDemand:
    """What decides the size of the cache.

    `free_bytes` is what the device has left beside the model, `budget_bytes` the part of it that
    the cache takes when nothing is said. `bytes_per_block` counts K and V of all layers. `gpu` says
    what takes the rest on a GPU.
    """

    model_limit: int
    max_num_seqs: int
    bytes_per_block: int
    free_bytes: int
    budget_bytes: int
    gpu: MemorySum | None = None

    def advice(self, num_blocks: int) -> str:
        """What makes room for so many blocks."""
        if self.gpu is None:
            return "A larger --kv-cache-memory-bytes or --num-gpu-blocks-override allows more"
        return self.gpu.advice(num_blocks * self.bytes_per_block)


def size_cache(cache: CacheConfig, max_model_len: int | None, demand: CacheDemand) -> CacheSize:
    """Number of blocks and the longest context.

    Without `max_model_len` the context is the model's limit, reduced to what the cache holds. An
    explicit one beyond the cache is refused, as is a cache that does not fit into memory
    (ConfigurationError, naming the flag and the largest value that works).
    """
    wanted = max_model_len or demand.model_limit
    num_blocks = _count_blocks(cache, wanted, demand)
    capacity = num_blocks * cache.block_size
    if max_model_len is not None and max_model_len > capacity:
        raise ConfigurationError(
            f"--max-model-len {max_model_len} does not fit into the KV cache of {num_blocks} "
            f"blocks of {cache.block_size} tokens; the largest value that works is {capacity}. "
            + demand.advice(-(-max_model_len // cache.block_size))
        )
    if wanted > capacity:
        overridden = cache.num_gpu_blocks_override is not None
        _logger.warning(
            "the context is limited to %d tokens, which is what the KV cache holds; the model "
            "supports %d (a larger %s allows more)",
            capacity,
            demand.model_limit,
            "--num-gpu-blocks-override" if overridden else "--kv-cache-memory-bytes",
        )
    return CacheSize(num_blocks, min(wanted, capacity))


def _count_blocks(cache: CacheConfig, wanted: int, demand: CacheDemand) -> int:
    most = demand.free_bytes // demand.bytes_per_block
    if cache.num_gpu_blocks_override is not None:
        if cache.num_gpu_blocks_override > most:
            raise ConfigurationError(
                f"--num-gpu-blocks-override {cache.num_gpu_blocks_override} needs "
                f"{cache.num_gpu_blocks_override * demand.bytes_per_block} bytes and "
                f"{demand.free_bytes} are free; the largest value that works is {most}"
            )
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        return _blocks_of_bytes(cache.kv_cache_memory_bytes, demand)
    num_blocks = demand.budget_bytes // demand.bytes_per_block
    if num_blocks < 1:
        raise ConfigurationError(
            f"too little memory for one block of the KV cache: it takes {demand.bytes_per_block} "
            f"bytes, and {max(0, demand.budget_bytes)} remain for the cache beside the model; "
            + _advice_for_one(cache, demand)
        )
    return min(num_blocks, demand.max_num_seqs * -(-wanted // cache.block_size))


def _advice_for_one(cache: CacheConfig, demand: CacheDemand) -> str:
    if demand.gpu is None:
        return "free some memory, or give a smaller --block-size"
    share = cache.gpu_memory_utilization
    return f"{demand.gpu.describe(0, share)}. {demand.advice(1)}"


def _blocks_of_bytes(wanted_bytes: int, demand: CacheDemand) -> int:
    if wanted_bytes > demand.free_bytes:
        raise ConfigurationError(
            f"--kv-cache-memory-bytes {wanted_bytes} is more than the {demand.free_bytes} bytes "
            f"that are free; the largest value that works is {demand.free_bytes}"
        )
    if wanted_bytes < demand.bytes_per_block:
        raise ConfigurationError(
            f"--kv-cache-memory-bytes {wanted_bytes} does not hold one block of the KV cache; "
            f"the smallest value that works is {demand.bytes_per_block}"
        )
    return wanted_bytes // demand.bytes_per_block


def size_host_memory(
    cache: CacheConfig, bytes_per_block: int, free_bytes: int, most_useful: int
) -> HostMemory:
    """Blocks in host memory for preempted sequences and for evicted blocks.

    `free_bytes` is what the cache leaves of host memory. The swap space shrinks to a part of that;
    an offload space that does not fit is refused (ConfigurationError). `most_useful` is how many
    blocks all sequences could hold.
    """
    num_offload_blocks = int(cache.kv_offload * _GIB) // bytes_per_block
    if num_offload_blocks * bytes_per_block > free_bytes:
        raise ConfigurationError(
            f"--kv-offload {cache.kv_offload} GiB is more host memory than is free; the largest "
            f"value that works is {free_bytes / _GIB:.2f}"
        )
    wanted = int(cache.swap_space * _GIB)
    granted = min(wanted, int((free_bytes - num_offload_blocks * bytes_per_block) * _SWAP_SHARE))
    if granted < wanted:
        _logger.info("swap space reduced to %.2f GiB of the free host memory", granted / _GIB)
    return HostMemory(min(granted // bytes_per_block, most_useful), num_offload_blocks)


def host_budget(free_bytes: int) -> int:
    """Bytes that the cache takes of `free_bytes` host memory when nothing is said."""
    return min(int(free_bytes * _HOST_SHARE), _HOST_MAXIMUM)


def free_host_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes that can be taken without swapping, within the limit of the container if it has one."""
    try:
        free = _kernel_values(meminfo)["MemAvailable:"] * 1024
    except FileNotFoundError:  # not Linux: the machine's memory is all that can be asked for
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        # Pages of files that nobody uses are given up under pressure.
        idle = _kernel_values(cgroup / "memory.stat")["inactive_file"]
    except FileNotFoundError:
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used + idle))


@contextmanager
def told_when_memory_runs_out(name: str) -> Iterator[None]:
    """Within it an allocation that fails on the host is a ConfigurationError about model `name`.

    It says what was asked for, what is free and what needs less.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"(?<=tried to allocate )\d+ bytes", str(error))
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        allowed = f", ulimit -v allows this process {limit} in all"
        raise ConfigurationError(
            f"{name}: the memory ran out during the load"
            f"{f', where {asked[0]} more were wanted' if asked else ''}; "
            f"{free_host_memory()} bytes are free"
            f"{'' if limit == resource.RLIM_INFINITY else allowed}. Use a smaller model, "
            "--quantization int8, a smaller --dtype or a smaller --kv-cache-memory-bytes"
        ) from error


def _kernel_values(path: Path) -> dict[str, int]:
    """The first number behind each name of a file with one name per line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {fields[0]: int(fields[1]) for fields in lines}


def _gpu_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)
