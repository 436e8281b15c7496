"""The whole application over a scripted model, reached without a socket."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import ScriptedExecutor, fake_loader
from served_app import ServeApp, ServedApp

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.server.app import create_app


@pytest.fixture
def serve_app(byte_bpe_dir: Path) -> ServeApp:
    """Opens the application; `script` are the token ids that the model emits."""

    @asynccontextmanager
    async def serve(
        script: Sequence[int] = (),
        *,
        before_load: Callable[[], None] = lambda: None,
        max_num_seqs: int = 8,
        **config: Any,
    ) -> AsyncIterator[ServedApp]:
        executor = ScriptedExecutor(script)
        load = fake_loader(byte_bpe_dir, executor, max_num_seqs=max_num_seqs, before=before_load)
        app = create_app(ServerConfig(**config), EngineConfig(), load)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://octavo") as client,
        ):
            try:
                yield ServedApp(app, client, executor)
            finally:
                executor.gate.set()

    return serve
