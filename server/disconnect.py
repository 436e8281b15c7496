"""Stopping work whose reader has gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from octavo.engine.core.errors import ClientDisconnectedError

T = TypeVar("T")


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns, or cancel it when the client goes away.

    The body of `request` must have been read before. Raises ClientDisconnectedError.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError("The client went away before its answer")
        return task.result()
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.wait((task, watcher))
        if not task.cancelled():
            # Looked at, so that the event loop does not report it a second time.
            task.exception()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
