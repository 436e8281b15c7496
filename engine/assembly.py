"""From a checkpoint to an engine: which executor runs it, and what it measured."""

import logging
from collections.abc import Callable

from octavo.config.engine import EngineConfig
from octavo.engine.core.limits import EngineLimits, HostMemory
from octavo.engine.core.model_output import Launch
from octavo.engine.executor.encoder import EncoderExecutor
from octavo.engine.executor.null import NullExecutor
from octavo.engine.executor.profiled import ProfiledExecutor
from octavo.engine.executor.uniproc import UniprocExecutor
from octavo.engine.loader import Checkpoint, EncoderCheckpoint
from octavo.engine.worker.memory import (
    check_cache_dtype,
    resolve_device,
    told_when_memory_runs_out,
)

logger = logging.getLogger(__name__)

AnyCheckpoint = Checkpoint | EncoderCheckpoint
AnyExecutor = UniprocExecutor | NullExecutor | EncoderExecutor


def make_executor(config: EngineConfig, checkpoint: AnyCheckpoint) -> AnyExecutor:
    """Load the weights and warm up. Raises ConfigurationError, of which CheckpointError is one."""
    with told_when_memory_runs_out(checkpoint.name):
        return _make_executor(config, checkpoint)


def check_device(config: EngineConfig) -> None:
    """Refuse a device or a cache that this machine does not have; ConfigurationError."""
    if config.load.load_format != "null":
        check_cache_dtype(config.cache, resolve_device(config.device.device))


def _make_executor(config: EngineConfig, checkpoint: AnyCheckpoint) -> AnyExecutor:
    if isinstance(checkpoint, EncoderCheckpoint):
        return EncoderExecutor(config, checkpoint)
    if config.load.load_format == "null":
        logger.warning("No model is run: the answers are meaningless (--load-format null)")
        return NullExecutor(config, checkpoint.model_config)
    return UniprocExecutor(config, checkpoint)


def engine_limits(
    config: EngineConfig, checkpoint: AnyCheckpoint, executor: AnyExecutor
) -> EngineLimits:
    """The sizes that `executor` settled, as the engine wants them."""
    if isinstance(executor, UniprocExecutor):
        host_memory, window = executor.host_memory, executor.window
    else:
        host_memory, window = HostMemory(), None
    return EngineLimits(
        max_model_len=executor.max_model_len,
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=executor.max_num_batched_tokens,
        num_blocks=executor.num_blocks,
        block_size=config.cache.block_size,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        host_memory=host_memory,
        window=window,
    )


def launch_of(executor: AnyExecutor, profiled: ProfiledExecutor | None = None) -> Launch | None:
    """What starts a step without waiting for it, where the executor can."""
    launch = executor.launch if isinstance(executor, UniprocExecutor) else None
    return launch if launch is None or profiled is None else profiled.around(launch)


def idle_work_of(executor: AnyExecutor) -> Callable[[], bool] | None:
    """Work for times without requests, a little with each call, until it returns False."""
    supply = executor.page_supply() if isinstance(executor, UniprocExecutor) else None
    return None if supply is None else supply.supply
