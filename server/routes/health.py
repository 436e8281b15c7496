"""Probes, the version and the metrics."""

import asyncio
import uuid
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from octavo.engine.core.sampling_params import SamplingParams
from octavo.server.disconnect import run_until_disconnect
from octavo.server.engine_stream import GenerateRequest
from octavo.server.lifecycle import Phase
from octavo.server.state import AppState, Serving, state_of
from octavo.server.version import VERSION

router = APIRouter(tags=["operations"])
State = Annotated[AppState, Depends(state_of)]


def _status(state: AppState) -> JSONResponse:
    lifecycle = state.lifecycle
    if lifecycle.phase is Phase.READY:
        return JSONResponse({"status": lifecycle.phase.value})
    content = {"status": lifecycle.phase.value}
    if lifecycle.phase is Phase.STARTING:
        content["progress"] = lifecycle.progress
    wait = lifecycle.retry_after
    return JSONResponse(content, 503, None if wait is None else {"Retry-After": str(wait)})


@router.get("/health")
@router.get("/health/ready")
@router.get("/ready")
@router.get("/ping")
@router.post("/ping")
async def health(state: State) -> JSONResponse:
    """Say whether requests are served: 200 or 503. Never runs the model."""
    return _status(state)


@router.get("/health_generate")
async def health_generate(request: Request, state: State) -> JSONResponse:
    """Make one token, so that the whole way through the engine is shown to work."""
    serving = state.require_serving()
    with serving.admission.admit():
        await run_until_disconnect(request, _generate_one(serving))
    return _status(state)


async def _generate_one(serving: Serving) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    if not serving.model.generates:
        params = SamplingParams(max_tokens=0, pooling=serving.model.embedding.pooling)
    work = GenerateRequest(
        request_id=f"health-{uuid.uuid4().hex}",
        prompt_token_ids=(serving.model.tokenizer.bos_token_id or 0,),
        params=params,
    )
    async with aclosing(serving.engine.generate(work)) as outputs:
        async for _ in outputs:
            pass


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of the server."""
    return {"version": VERSION}


@router.get("/metrics", response_class=Response)
async def metrics(state: State) -> Response:
    """Return all metrics in Prometheus' text format."""
    state.metrics.note_tasks(len(asyncio.all_tasks()))
    alias = None if state.config.metrics_alias == "none" else state.config.metrics_alias
    return Response(state.metrics.render(alias), media_type=CONTENT_TYPE_LATEST)
