"""The application: routes, middlewares and the engine behind them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.server.auth import AuthMiddleware, KeyStore
from octavo.server.errors import install_error_handlers
from octavo.server.lifecycle import Lifecycle
from octavo.server.loaded_engine import Loader, load_engine
from octavo.server.metrics import ServerMetrics
from octavo.server.middleware import (
    REQUEST_ID_HEADER,
    BodyLimitMiddleware,
    RequestContextMiddleware,
)
from octavo.server.routes import (
    admin,
    chat,
    completions,
    embeddings,
    health,
    models,
    responses,
    tokenize,
)
from octavo.server.state import AppState
from octavo.server.supervisor import Supervisor
from octavo.server.tracing import Tracer
from octavo.server.version import VERSION

ROUTERS = (
    completions.router,
    chat.router,
    responses.router,
    embeddings.router,
    models.router,
    tokenize.router,
    health.router,
)


def create_app(
    server_config: ServerConfig, engine_config: EngineConfig, load: Loader = load_engine
) -> FastAPI:
    """Make the application. Its lifespan loads the model by `load`, in a thread of its own.

    Raises ConfigurationError when the keys cannot be read or traces cannot be made.
    """
    keys = KeyStore(server_config)
    endpoint = server_config.otlp_endpoint
    tracer = None if endpoint is None else Tracer(endpoint)
    state = AppState(server_config, Lifecycle(), ServerMetrics())
    supervisor = Supervisor(state, server_config, engine_config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        supervisor.start(load)
        try:
            yield
        finally:
            await supervisor.stop()
            if tracer is not None:
                await asyncio.to_thread(tracer.shutdown)

    docs = not server_config.disable_fastapi_docs
    app = FastAPI(
        title="Octavo",
        summary="OpenAI-compatible inference",
        version=VERSION,
        docs_url="/docs" if docs else None,
        redoc_url="/redoc" if docs else None,
        openapi_url="/openapi.json" if docs else None,
        # A redirect would be an answer of another form than the error object.
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.octavo = state
    app.state.supervisor = supervisor
    app.state.keys = keys
    for router in ROUTERS:
        app.include_router(router)
    if server_config.enable_admin:
        app.include_router(admin.router)
    install_error_handlers(app)
    _add_middlewares(app, state, keys, tracer)
    return app


def _add_middlewares(app: FastAPI, state: AppState, keys: KeyStore, tracer: Tracer | None) -> None:
    """Add them from the innermost to the outermost."""
    config = state.config
    app.add_middleware(BodyLimitMiddleware, max_body_size=config.max_body_size)
    app.add_middleware(AuthMiddleware, keys=keys)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=(REQUEST_ID_HEADER,),
    )
    app.add_middleware(
        RequestContextMiddleware,
        metrics=state.metrics,
        quiet_paths=config.disable_access_log_for_endpoints,
        tracer=tracer,
    )
