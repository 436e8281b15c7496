"""What the routes find in `app.state.octavo`.

A route that does work asks `state.require_serving()` first (it raises NotReadyError or
EngineDeadError), then takes its place with `serving.admission.admit()`, and only then reads its
body. Size limits and keys are checked by the middlewares around all routes.
"""

import time
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from octavo.config.server import ServerConfig
from octavo.engine.core.limits import EngineLimits
from octavo.server.admission import Admission
from octavo.server.async_engine import AsyncEngine
from octavo.server.chat_service import ChatService
from octavo.server.completion_service import CompletionService
from octavo.server.embedding_service import EmbeddingService
from octavo.server.key_limits import KeyLimits
from octavo.server.lifecycle import Lifecycle
from octavo.server.metrics import ServerMetrics
from octavo.server.profiling import Profiler
from octavo.server.request_builder import RequestBuilder
from octavo.server.responses_service import ResponsesService
from octavo.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Serving:
    """What exists once the model is loaded."""

    engine: AsyncEngine
    model: ServedModel
    limits: EngineLimits
    admission: Admission
    chat: ChatService
    completions: CompletionService
    responses: ResponsesService
    embeddings: EmbeddingService


@dataclass(slots=True)
class AppState:
    """One per application; `serving` is set when the server becomes ready.

    `profiler` is set then too, with --enable-admin.
    """

    config: ServerConfig
    lifecycle: Lifecycle
    metrics: ServerMetrics
    serving: Serving | None = None
    profiler: Profiler | None = None

    def require_serving(self) -> Serving:
        """Return what serves requests. Raises NotReadyError or EngineDeadError."""
        self.lifecycle.check()
        assert self.serving is not None
        return self.serving


def build_serving(
    engine: AsyncEngine,
    model: ServedModel,
    limits: EngineLimits,
    config: ServerConfig,
    priority_scheduling: bool,
) -> Serving:
    """Wire the services around a running engine."""
    builder = RequestBuilder(model, limits, config, priority_scheduling)
    chat = ChatService(builder)
    return Serving(
        engine=engine,
        model=model,
        limits=limits,
        admission=Admission(
            capacity=limits.max_num_seqs + config.max_num_queued_reqs,
            max_queued_tokens=config.max_num_queued_tokens,
            queued_tokens=engine.num_waiting_tokens,
            key_limits=KeyLimits(config.key_max_concurrency, config.key_rpm, time.monotonic),
        ),
        chat=chat,
        completions=CompletionService(builder),
        responses=ResponsesService(builder, chat),
        embeddings=EmbeddingService(engine, model, limits.max_num_seqs),
    )


def get_state(connection: HTTPConnection) -> AppState:
    """Return the application's state."""
    state: AppState = connection.app.state.octavo
    return state


async def state_of(connection: HTTPConnection) -> AppState:
    """Return the same as a FastAPI dependency; a plain function would be run in a thread."""
    return get_state(connection)
