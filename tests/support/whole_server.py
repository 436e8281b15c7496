"""The whole server over a checkpoint: the real tokenizer, engine and kernels, without a socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.server.app import create_app
from octavo.server.lifecycle import Phase
from octavo.server.startup import load_engine
from octavo.server.state import AppState

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass
class WholeServer:
    """A client of the server, and the server's own state."""

    client: httpx.AsyncClient
    state: AppState

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Send a JSON body and return the JSON of a good answer."""
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """Send a JSON body that must be refused and return the error object."""
        response = await self.client.post(path, json=body)
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        return error

    async def texts(self, **body: Any) -> list[str]:
        """Complete and return the texts of all choices."""
        return [choice["text"] for choice in (await self.post(COMPLETIONS, **body))["choices"]]

    async def tokens_of(self, **body: Any) -> list[int]:
        """Return what /tokenize makes of a prompt or of messages."""
        tokens: list[int] = (await self.post("/tokenize", **body))["tokens"]
        return tokens

    async def is_idle(self) -> bool:
        """True once nothing runs, waits or holds a block; False after two seconds."""
        assert self.state.serving is not None
        for _ in range(200):
            stats = self.state.serving.engine.stats()
            left = (stats.num_running, stats.num_waiting, stats.num_used_blocks)
            if left == (0, 0, 0) and self.state.serving.admission.num_accepted == 0:
                return True
            await asyncio.sleep(0.01)
        return False


@contextlib.asynccontextmanager
async def whole_server(
    checkpoint: Path, *, num_blocks: int = 256, **server: Any
) -> AsyncIterator[WholeServer]:
    """Serve a checkpoint on the CPU; `server` are fields of ServerConfig."""
    engine_config = EngineConfig.model_validate(
        {
            "load": {"model": str(checkpoint)},
            "cache": {"num_gpu_blocks_override": num_blocks},
            "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 512},
            "device": {"device": "cpu"},
        }
    )
    config = ServerConfig(served_model_name=("M",), disable_log_stats=True, **server)
    app = create_app(config, engine_config, load_engine)
    state: AppState = app.state.octavo
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=60) as client,
    ):
        assert await state.lifecycle.wait_until_started() is Phase.READY
        yield WholeServer(client, state)
