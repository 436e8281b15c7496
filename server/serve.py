"""Running the application in this process until it is told to stop."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Generator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.loader.files import remove_temporary_dirs
from octavo.server.app import create_app
from octavo.server.auth import KeyStore
from octavo.server.http_protocol import HttpProtocol
from octavo.server.lifecycle import Phase
from octavo.server.listener import describe, is_open_to_others, local_url
from octavo.server.loaded_engine import Loader, load_engine
from octavo.server.state import AppState, Serving
from octavo.server.supervisor import Supervisor
from octavo.server.turns import take_short_turns

logger = logging.getLogger(__name__)

# What connections get to close once nothing is being answered any more.
_CLOSE_S = 5


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would close the port before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def run(
    server_config: ServerConfig,
    engine_config: EngineConfig,
    listener: socket.socket,
    load: Loader = load_engine,
) -> int:
    """Serve on `listener` until a signal comes; returns the exit code.

    Raises ConfigurationError when the start is impossible as configured.
    """
    app = create_app(server_config, engine_config, load)
    config = make_uvicorn_config(app, server_config)
    if is_open_to_others(listener) and not app.state.keys.needs_key:
        logger.warning(
            "Listening beyond this machine without a key: anyone who reaches the port can use it. "
            "Give --api-key, or --host 127.0.0.1"
        )
    take_short_turns()
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_Run(app, _Server(config), server_config, listener).main())


def make_uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """Return the settings of the HTTP server. Raises ConfigurationError for bad TLS files."""
    uvicorn_config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        root_path=config.root_path,
        server_header=False,
        timeout_keep_alive=config.timeout_keep_alive,
        timeout_graceful_shutdown=_CLOSE_S,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
    )
    _check_tls_files(config)
    try:
        uvicorn_config.load()
    except OSError as error:
        raise ConfigurationError(
            "--ssl-certfile, --ssl-keyfile or --ssl-ca-certs cannot be used; they must be PEM "
            f"files, and the key that of the certificate: {error}"
        ) from error
    return uvicorn_config


def _check_tls_files(config: ServerConfig) -> None:
    """Raise ConfigurationError for a file that cannot be read: ssl does not say which it was."""
    files = {
        "--ssl-certfile": config.ssl_certfile,
        "--ssl-keyfile": config.ssl_keyfile,
        "--ssl-ca-certs": config.ssl_ca_certs,
    }
    for flag, path in files.items():
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{flag}: cannot read {path}: {error.strerror}") from error


class _Run:
    """One run of the server, from the first byte to the last."""

    def __init__(
        self, app: FastAPI, server: _Server, config: ServerConfig, listener: socket.socket
    ) -> None:
        self._server = server
        self._config = config
        self._listener = listener
        self._state: AppState = app.state.octavo
        self._supervisor: Supervisor = app.state.supervisor
        self._keys: KeyStore = app.state.keys
        self._stopping: asyncio.Task[None] | None = None

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        announcer = asyncio.create_task(self._announce())
        await self._server.serve(sockets=[self._listener])
        announcer.cancel()
        if self._config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._config.uds)
        return self._state.lifecycle.exit_code

    def _on_signal(self, number: int) -> None:
        if self._stopping is not None:
            logger.warning("Second signal: ending at once")
            leave(128 + number)
            return
        logger.info("Shutting down; unfinished requests get %g s", self._config.shutdown_timeout)
        self._stopping = asyncio.create_task(self._stop())

    def _reload(self) -> None:
        """Read keys and certificates again; what cannot be read leaves the old ones in place."""
        try:
            self._keys.reload()
            logger.info("SIGHUP: valid keys are %s", ", ".join(self._keys.names) or "none")
        except ConfigurationError as error:
            logger.error("SIGHUP: the keys stay as they were: %s", error)
        tls, certificate = self._server.config.ssl, self._config.ssl_certfile
        if tls is None or certificate is None:
            return
        try:
            # First where nothing is broken by a key that does not belong to the certificate.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                certificate, self._config.ssl_keyfile
            )
            # Connections that are open keep what they were opened with.
            tls.load_cert_chain(certificate, self._config.ssl_keyfile)
            logger.info("SIGHUP: new connections get the certificate of %s", certificate)
        except OSError as error:
            logger.error("SIGHUP: the certificate stays as it was: %s", error)

    async def _stop(self) -> None:
        await self._supervisor.drain()
        self._server.should_exit = True

    async def _announce(self) -> None:
        """Say that the server is ready, or end it when it could not start."""
        phase = await self._state.lifecycle.wait_until_started()
        if phase is Phase.FAILED and self._state.serving is None:
            self._server.should_exit = True
        elif phase is Phase.READY and self._state.serving is not None:
            # What is left stays: to look through it for garbage would hold all streams up.
            gc.collect()
            gc.freeze()
            gc.enable()
            serving, needs_key = self._state.serving, self._keys.needs_key
            logger.info("%s", _ready_message(self._config, self._listener, serving, needs_key))


def _ready_message(
    config: ServerConfig, listener: socket.socket, serving: Serving, needs_key: bool
) -> str:
    url = describe(config, listener)
    model = serving.model
    target = local_url(config, listener)
    if url.startswith("unix:"):
        target = f"--unix-socket {url.removeprefix('unix:')} http://localhost"
    path, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}]}'
    if not model.generates:
        path, body = "/v1/embeddings", '{"input": "Hello!"}'
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return (
        f"Octavo is ready on {url} serving {', '.join(model.names)} "
        f"(context {model.max_model_len} tokens, {serving.limits.num_blocks} cache blocks). Try:\n"
        f"  curl {target}{path}{key} -H 'Content-Type: application/json' -d '{body}'"
    )


def leave(code: int) -> None:
    """End the process, also when a thread is stuck in a load or in a step.

    Such threads are daemons, but the interpreter's own clean-up pulls away what they still use.
    """
    remove_temporary_dirs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
