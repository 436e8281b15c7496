"""Keeps the engine behind the application: loads it, watches it, stops it."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ConfigurationError, NotReadyError
from octavo.server.async_engine import AsyncEngine
from octavo.server.diagnostics import thread_stack
from octavo.server.loaded_engine import LoadedEngine, Loader
from octavo.server.profiling import Profiler
from octavo.server.state import AppState, build_serving
from octavo.server.time_limits import TimeLimits

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.05
# What the answers of aborted requests get to reach their clients.
_FLUSH_S = 5.0
_THREAD_STOP_S = 10.0
_WATCHDOG_MAX_POLL_S = 1.0
_LAG_PERIOD_S = 0.1


class Supervisor:
    """One per application. All methods run on the event loop thread."""

    def __init__(
        self, state: AppState, server_config: ServerConfig, engine_config: EngineConfig
    ) -> None:
        self._state = state
        self._server_config = server_config
        self._engine_config = engine_config
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, load: Loader) -> None:
        """Begin to load in a thread of its own; the application answers meanwhile."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            def report(stage: str) -> None:
                _call(loop, self._state.lifecycle.report_progress, stage)

            try:
                loaded = load(self._server_config, self._engine_config, report)
            except Exception as error:  # whatever it is, the start ends with a message
                _call(loop, self._on_load_failed, error)
            else:
                _call(loop, self._on_loaded, loaded)

        # A daemon: nothing can interrupt a load, and it must not keep a stopped process alive.
        # It ends before the engine's thread steps, to which torch then gives its cuBLAS handle with
        # the workspace that the memory profile has counted. While it lived there would be two.
        threading.Thread(target=work, name="octavo-loader", daemon=True).start()

    async def stop(self) -> None:
        """Stop the watchers and the engine's thread."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._state.serving is not None:
            await self._state.serving.engine.shutdown(_THREAD_STOP_S)

    async def drain(self) -> None:
        """Refuse new requests and let the accepted ones end, the late ones with an error."""
        self._state.lifecycle.mark_draining()
        serving = self._state.serving
        if serving is None:
            return
        await self._wait_until_idle(self._server_config.shutdown_timeout)
        if serving.admission.num_accepted > 0:
            logger.warning("%d requests did not end in time", serving.admission.num_accepted)
            serving.engine.abort_all(
                NotReadyError("The server is shutting down", "server_draining", retry_after=10)
            )
            await self._wait_until_idle(_FLUSH_S)

    async def _wait_until_idle(self, timeout: float) -> None:
        assert self._state.serving is not None
        admission = self._state.serving.admission
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while admission.num_accepted > 0:
                    await asyncio.sleep(_POLL_S)

    def _on_loaded(self, loaded: LoadedEngine) -> None:
        state = self._state
        engine = AsyncEngine(
            loaded.make_thread,
            loaded.model.tokenizer,
            state.metrics,
            on_dead=self._on_dead,
            limits=TimeLimits(
                self._server_config.queue_timeout, self._server_config.request_timeout
            ),
            log_requests=self._server_config.enable_log_requests,
            stream_interval=self._server_config.stream_interval,
        )
        state.serving = build_serving(
            engine,
            loaded.model,
            loaded.limits,
            self._server_config,
            self._engine_config.scheduler.scheduling_policy == "priority",
        )
        if loaded.profiled is not None:
            state.profiler = Profiler(loaded.profiled)
        state.metrics.attach_engine(loaded.model.name, loaded.cache_info, engine.stats)
        engine.start()
        self._tasks.append(asyncio.create_task(self._measure_lag()))
        self._tasks.append(asyncio.create_task(self._watch(engine)))
        if not self._server_config.disable_log_stats:
            self._tasks.append(asyncio.create_task(self._log_stats(engine)))
        state.lifecycle.mark_ready()

    def _on_load_failed(self, error: Exception) -> None:
        if isinstance(error, ConfigurationError):
            logger.error("%s", error)
        else:
            logger.error("The model could not be loaded: %s: %s", type(error).__name__, error)
        logger.debug("Details of the failed start", exc_info=error)
        self._state.lifecycle.mark_failed(str(error))

    def _on_dead(self, reason: str) -> None:
        logger.error("The engine has failed: %s", reason)
        if self._state.serving is not None:
            for line in self._state.serving.engine.last_requests():
                logger.error("Asked before: %s", line)
        self._state.lifecycle.mark_failed(reason)

    async def _watch(self, engine: AsyncEngine) -> None:
        limit = self._server_config.watchdog_timeout
        poll = min(limit / 4, _WATCHDOG_MAX_POLL_S)
        watched = 0.0
        while engine.failure is None:
            await asyncio.sleep(poll)
            # Time in which the whole process stood still, this loop too, is no fault of the step.
            watched = min(engine.step_seconds(), watched + poll)
            if watched > limit:
                logger.error("The engine's thread stands here:\n%s", thread_stack("engine"))
                engine.fail(f"a step ran longer than --watchdog-timeout ({limit:g} s)")

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self._state.metrics.observe_lag(loop.time() - due)

    async def _log_stats(self, engine: AsyncEngine) -> None:
        metrics = self._state.metrics
        before = (metrics.num_prompt_tokens, metrics.num_generation_tokens)
        moment = time.monotonic()
        while True:
            await asyncio.sleep(self._server_config.log_stats_interval)
            now = time.monotonic()
            after = (metrics.num_prompt_tokens, metrics.num_generation_tokens)
            stats = engine.stats()
            if after != before or stats.num_running or stats.num_waiting:
                queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
                logger.info(
                    "Prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
                    "cache usage %.1f %%, prefix hit rate %.1f %%",
                    (after[0] - before[0]) / (now - moment),
                    (after[1] - before[1]) / (now - moment),
                    stats.num_running,
                    stats.num_waiting,
                    100 * stats.kv_cache_usage,
                    100 * hits / queries if queries else 0.0,
                )
            before, moment = after, now


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
    # RuntimeError: the event loop was closed while the model was loading.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, argument)
