"""An application that is being served to a test."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import httpx
from fake_engine import ScriptedExecutor
from fastapi import FastAPI

from octavo.server.lifecycle import Phase
from octavo.server.state import AppState


@dataclass
class ServedApp:
    """An application whose lifespan runs."""

    app: FastAPI
    client: httpx.AsyncClient
    executor: ScriptedExecutor

    @property
    def state(self) -> AppState:
        state: AppState = self.app.state.octavo
        return state

    async def wait_for(self, phase: Phase) -> None:
        async with asyncio.timeout(10):
            while self.state.lifecycle.phase is not phase:
                await asyncio.sleep(0.005)

    async def idle(self) -> None:
        """Wait until no request is left and no block is in use."""
        assert self.state.serving is not None
        serving = self.state.serving
        async with asyncio.timeout(10):
            while serving.admission.num_accepted or serving.engine.stats().num_used_blocks:
                await asyncio.sleep(0.005)


ServeApp = Callable[..., AbstractAsyncContextManager[ServedApp]]
