"""The executor that runs the model in the engine's own thread, on one device."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from octavo.config.cache import CacheConfig
from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig
from octavo.engine.attention.metadata import CacheScales, KVCacheLayout
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.core.limits import HostMemory, PreemptionCosts
from octavo.engine.core.model_output import Launch, ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.executor.gpu import GpuStart, MakeRunner
from octavo.engine.loader import Checkpoint
from octavo.engine.loader.filling import WeightRoom, load_model
from octavo.engine.models.decoder import CausalLM
from octavo.engine.worker.device_memory import CudaMemory
from octavo.engine.worker.device_runner import DeviceRunner
from octavo.engine.worker.device_step import Bounds
from octavo.engine.worker.device_stream import CudaStream, DeviceStream
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import RunnerLimits
from octavo.engine.worker.memory import (
    CacheDemand,
    CacheSize,
    StepLimits,
    check_context,
    free_host_memory,
    host_budget,
    pace_steps,
    resolve_cache_dtype,
    resolve_device,
    resolve_dtype,
    resolve_step_limits,
    size_cache,
    size_host_memory,
)
from octavo.engine.worker.model_runner import ModelRunner
from octavo.engine.worker.page_supply import PageSupply
from octavo.engine.worker.warm_up import measure_block_copy, measure_prefill, warm_up
from octavo.kernels import ops

# As many as there are ways of sampling in the warm-up.
_WARM_UP_SEQS = 3
# Of the prompt that is measured. Fewer leave a part of a GPU without work, and would make a token
# look as dear as several; on a CPU no more are needed, and nobody should wait for them.
_MEASURED_ON_GPU = 2048
_MEASURED_ON_CPU = 128
# Of a cache beside which the memory does not suffice.
_SPARED_SHARE = 0.1

_logger = logging.getLogger(__name__)

_lost: list[ModelRunner | DeviceRunner] = []
"""Runners of devices that failed."""


class UniprocExecutor:
    """Loads the model, sizes the cache and runs steps."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        """Ready to serve once made: prefills and decodes have run, and on a GPU all is compiled.

        Raises ConfigurationError for what does not fit, CheckpointError for damaged weights.
        """
        facts = checkpoint.model_config
        check_context(config.load.max_model_len, facts.max_model_len)
        device = resolve_device(config.device.device)
        dtype = resolve_dtype(config.load.dtype, facts)
        cache_dtype = resolve_cache_dtype(config.cache, dtype, device)
        if device.type == "cpu":
            ops.set_cpu_threads(dtype, config.device.num_cpu_threads)
        steps = resolve_step_limits(config.scheduler, device)
        model = _load(config, checkpoint, dtype, device)
        start = _Start(
            model=model,
            facts=facts,
            cache_dtype=cache_dtype,
            scales=None if cache_dtype == dtype else model.cache_scales(),
            block_size=config.cache.block_size,
            steps=steps,
            device=device,
            stream=device_stream(device),
            deterministic=config.device.deterministic,
        )
        gpu = start.gpu(config)
        demand = start.cache_demand(config.cache.gpu_memory_utilization, gpu)
        size = size_cache(config.cache, config.load.max_model_len, demand)
        self._steps = steps
        self._size = size
        self._window = start.common_window
        self._host_memory = start.host_memory(config.cache, size)
        self._compiled_late: list[str] = []
        self._runner: ModelRunner | DeviceRunner
        self._launch: Launch | None = None
        if gpu is None:
            self._runner = start.cpu_runner(size, self._host_memory)
            warm_up_first_steps(self._runner, config.cache.block_size)
            self._measure(config, on_cpu=True)
        else:
            with _out_of_memory(config, size, demand):
                runner = start.device_runner(size, self._host_memory)
                self._runner, self._launch = runner, runner.launch
                warm_up_first_steps(runner, config.cache.block_size)
                _logger.info("%d decode steps recorded", gpu.prepare(runner))
                # Before, the time to compile would count.
                self._measure(config, on_cpu=False)
            ops.watch_compilations(self._note_compilation)
            _logger.info("%s", _describe(config, size, demand))
        _logger.info(
            "%s in %s%s on %s: %d cache blocks of %d tokens, context %d, %d sequences and "
            "%d tokens per step",
            checkpoint.name,
            str(dtype).removeprefix("torch."),
            "" if config.load.quantization == "none" else " with int8 weights",
            device,
            size.num_blocks,
            config.cache.block_size,
            size.max_model_len,
            self._steps.max_num_seqs,
            self._steps.max_num_batched_tokens,
        )

    def _measure(self, config: EngineConfig, on_cpu: bool) -> None:
        """What decides how sequences give way, and how large steps on a CPU are."""
        runner = self._runner
        chooses = runner.kv_cache.num_host_blocks and config.scheduler.preemption_mode == "auto"
        is_paced = on_cpu and config.scheduler.max_num_batched_tokens is None
        if not (chooses or is_paced):
            return
        num_tokens = _MEASURED_ON_CPU if on_cpu else _MEASURED_ON_GPU
        token_seconds = measure_prefill(runner, min(num_tokens, self._steps.max_num_batched_tokens))
        if chooses:
            costs = PreemptionCosts(token_seconds, measure_block_copy(runner))
            self._host_memory = replace(self._host_memory, costs=costs)
        if is_paced:
            self._steps = pace_steps(self._steps, token_seconds)

    def _note_compilation(self, kernel: str) -> None:
        _logger.warning("the kernel %s was compiled while serving: a warm-up is missing", kernel)
        self._compiled_late.append(kernel)

    @property
    def compiled_late(self) -> tuple[str, ...]:
        """GPU kernels that were compiled after the start; there should be none."""
        return tuple(self._compiled_late)

    @property
    def launch(self) -> Launch | None:
        """Starts a step and returns what waits for it; None where steps cannot overlap."""
        return self._launch

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self._size.num_blocks

    @property
    def max_model_len(self) -> int:
        """The longest context that the checkpoint, the cache and the configuration allow."""
        return self._size.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in one step."""
        return self._steps.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens in one step."""
        return self._steps.max_num_batched_tokens

    @property
    def host_memory(self) -> HostMemory:
        """Blocks in host memory, and what it costs to use them."""
        return self._host_memory

    @property
    def window(self) -> int | None:
        """The longest sliding window; None where a layer sees everything."""
        return self._window

    def page_supply(self) -> PageSupply | None:
        """Pages of the cache that the system may give before they are needed."""
        return self._runner.kv_cache.page_supply()

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        """Carries out one step."""
        return self._runner.execute(plan)

    def shutdown(self) -> None:
        """Gives up the model and the cache."""
        ops.watch_compilations(None)
        self._launch = None
        try:
            self._runner.synchronize()
        except torch.AcceleratorError:
            # To free what a lost device holds ends the process, which has yet to say what happened.
            _lost.append(self._runner)
        del self._runner


def warm_up_first_steps(runner: ModelRunner | DeviceRunner, block_size: int) -> None:
    """Runs a prefill over a border of blocks and a decode, with each way of sampling."""
    warm_up(runner, _WARM_UP_SEQS, 2 * block_size + 1)


def device_stream(device: torch.device) -> DeviceStream | None:
    """Where the steps of `device` run beside the host; None for a CPU, which has no such place."""
    return None if device.type == "cpu" else CudaStream(device)


def _describe(config: EngineConfig, size: CacheSize, demand: CacheDemand) -> str:
    assert demand.gpu is not None, "there is no such sum for a CPU"
    cache_bytes = size.num_blocks * demand.bytes_per_block
    return demand.gpu.describe(cache_bytes, config.cache.gpu_memory_utilization)


@contextmanager
def _out_of_memory(config: EngineConfig, size: CacheSize, demand: CacheDemand) -> Iterator[None]:
    """Within it a GPU whose memory runs out is told with what takes it, and a cache that fits."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        fewer = int(size.num_blocks * (1 - _SPARED_SHARE)) * demand.bytes_per_block
        raise ConfigurationError(
            f"the GPU's memory ran out before the first request. {_describe(config, size, demand)}."
            f" --kv-cache-memory-bytes {fewer} leaves {_SPARED_SHARE:.0%} of the cache to the steps"
        ) from error


def _load(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> CausalLM:
    with ExitStack() as packing:
        if config.device.deterministic:
            packing.enter_context(ops.fixed_shapes())
        if config.load.quantization == "int8":
            check_int8(dtype, device)
            packing.enter_context(ops.int8_weights())
        try:
            room = None
            if device.type == "cpu":
                room = WeightRoom(free_host_memory(), config.load.quantization == "int8")
            return load_model(checkpoint, dtype, device, room)
        except torch.OutOfMemoryError as error:
            # The first line says how much was asked for, how much there is and who has it.
            reason = str(error).partition("If reserved")[0].strip()
            raise ConfigurationError(
                f"the weights of {checkpoint.name} do not fit into the GPU's memory; use a smaller "
                f"model, free memory, or give --device cpu ({reason})"
            ) from error


def check_int8(dtype: torch.dtype, device: torch.device) -> None:
    """Refuses int8 weights where there are no kernels for them; ConfigurationError."""
    if device.type != "cpu":
        raise ConfigurationError(
            f"--quantization int8 is not supported on {device.type}; "
            "use --quantization none, or --device cpu"
        )
    if not ops.can_quantize(dtype, device):
        raise ConfigurationError(
            "--quantization int8 needs the CPU's own kernels, which cannot be used here (see the "
            "warning above); use --quantization none"
        )


@dataclass(frozen=True, slots=True)
class _Start:
    """What is known before the size of the cache is: enough to make runners and to measure."""

    model: CausalLM
    facts: ModelConfig
    cache_dtype: torch.dtype
    scales: tuple[CacheScales, ...] | None
    block_size: int
    steps: StepLimits
    device: torch.device
    stream: DeviceStream | None
    deterministic: bool = False

    def gpu(self, config: EngineConfig) -> GpuStart | None:
        """What a start on a GPU has to do beside; None on CPU."""
        if self.stream is None:
            return None
        sizes = GpuStart.sizes_for(self.steps.max_num_seqs, config.device.enforce_eager)
        longest = config.load.max_model_len or self.facts.max_model_len
        return GpuStart(
            CudaMemory(self.device), self.steps, self.block_size, self._bounds(longest), sizes
        )

    def _bounds(self, max_model_len: int) -> Bounds:
        return Bounds(self.steps.max_num_batched_tokens, max_model_len, self.deterministic)

    @property
    def common_window(self) -> int | None:
        windows = [window for window in self.facts.windows if window is not None]
        return max(windows) if len(windows) == self.facts.num_layers else None

    def host_memory(self, cache: CacheConfig, size: CacheSize) -> HostMemory:
        bytes_per_block = self._bytes_per_block
        free = free_host_memory()
        if self.device.type == "cpu":
            free = max(0, free - size.num_blocks * bytes_per_block)
        blocks_each = -(-size.max_model_len // self.block_size)
        most_useful = self.steps.max_num_seqs * blocks_each
        return size_host_memory(cache, bytes_per_block, free, most_useful)

    def cpu_runner(self, size: CacheSize, host_memory: HostMemory) -> ModelRunner:
        cache = self._kv_cache(size, host_memory)
        return ModelRunner(self.model, cache, self._limits(size), self.device)

    def device_runner(self, size: CacheSize, host_memory: HostMemory) -> DeviceRunner:
        assert self.stream is not None, "a CPU has no stream"
        cache, bounds = self._kv_cache(size, host_memory), self._bounds(size.max_model_len)
        return DeviceRunner(self.model, cache, self._limits(size), self.stream, bounds)

    def _kv_cache(self, size: CacheSize, host_memory: HostMemory) -> KVCache:
        return KVCache(
            self._layout(size.num_blocks),
            self.facts.num_layers,
            self.device,
            host_memory.num_swap_blocks + host_memory.num_offload_blocks,
            self.scales,
        )

    def _limits(self, size: CacheSize) -> RunnerLimits:
        return RunnerLimits(
            max_num_seqs=self.steps.max_num_seqs,
            max_model_len=size.max_model_len,
            vocab_size=self.facts.vocab_size,
            eos_token_ids=self.facts.eos_token_ids,
            window=self.common_window,
        )

    def cache_demand(self, gpu_utilization: float, gpu: GpuStart | None) -> CacheDemand:
        memory = None if gpu is None else gpu.measure(self._small_runner(gpu.bounds))
        if memory is None:
            free = free_host_memory()
            budget = host_budget(free)
        else:
            free = memory.cache_budget(1.0)
            budget = memory.cache_budget(gpu_utilization)
        return CacheDemand(
            model_limit=self.facts.max_model_len,
            max_num_seqs=self.steps.max_num_seqs,
            bytes_per_block=self._bytes_per_block,
            free_bytes=free,
            budget_bytes=budget,
            gpu=memory,
        )

    def _small_runner(self, bounds: Bounds) -> MakeRunner:
        longest = bounds.seq_lens[-1]
        return lambda num_blocks: self.device_runner(CacheSize(num_blocks, longest), HostMemory())

    @property
    def _bytes_per_block(self) -> int:
        return self._layout(0).bytes_per_block * self.facts.num_layers

    def _layout(self, num_blocks: int) -> KVCacheLayout:
        facts = self.facts
        return KVCacheLayout(
            num_blocks, facts.num_kv_heads, self.block_size, facts.head_dim, self.cache_dtype
        )
