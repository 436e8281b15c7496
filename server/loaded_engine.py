"""What loading hands to the server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.core.limits import EngineLimits
from octavo.engine.executor.profiled import ProfiledExecutor
from octavo.server.async_engine import EngineThreadFactory
from octavo.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """Everything that the server needs to start serving. `make_thread` is called once.

    `profiled` runs the engine's steps where they may be recorded.
    """

    model: ServedModel
    limits: EngineLimits
    make_thread: EngineThreadFactory
    profiled: ProfiledExecutor | None = None

    @property
    def cache_info(self) -> Mapping[str, str]:
        """Labels of the metric that describes the cache."""
        return {
            "block_size": str(self.limits.block_size),
            "num_gpu_blocks": str(self.limits.num_blocks),
        }


Report = Callable[[str], None]
"""Takes what a load is doing now, in a few words; from any thread."""

Loader = Callable[[ServerConfig, EngineConfig, Report], LoadedEngine]


def load_engine(
    server_config: ServerConfig, engine_config: EngineConfig, report: Report
) -> LoadedEngine:
    """Load the configured model; `startup` documents the rest."""
    # Here and not above: `startup` imports this module.
    from octavo.server import startup  # noqa: PLC0415

    return startup.load_engine(server_config, engine_config, report)
