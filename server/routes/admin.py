"""Routes for the operator: there only with --enable-admin, and behind a key of their own."""

import asyncio
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from octavo.engine.core.block_map import BlockMap
from octavo.engine.core.errors import AdminKeyError, InvalidRequestError
from octavo.server.context import current_request
from octavo.server.openapi import ERROR_RESPONSES, describe_body
from octavo.server.protocol.blocks import BlocksAnswer
from octavo.server.protocol.common import RequestBody
from octavo.server.state import AppState, state_of
from octavo.server.validation.fields import read_fields


async def require_admin() -> None:
    """Raise AdminKeyError unless the admin key came along."""
    if not current_request().is_admin:
        raise AdminKeyError("This route needs the admin key")


router = APIRouter(tags=["admin"], responses=ERROR_RESPONSES, dependencies=[Depends(require_admin)])
State = Annotated[AppState, Depends(state_of)]


class ResetAnswer(BaseModel):
    """Whether the prefix cache was emptied; it is not while any sequence holds a block."""

    reset: bool


class ProfileRequest(RequestBody):
    """Which steps to record."""

    num_steps: int = Field(default=10, ge=1, le=1000, description="Steps to record.")
    timeout: float = Field(
        default=60.0, gt=0, le=600, description="Seconds to wait for them; an idle engine has none."
    )


class ProfileAnswer(BaseModel):
    """Where the trace lies on the server's disk; Perfetto and chrome://tracing show it."""

    path: str
    num_steps: int


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(state: State) -> ResetAnswer:
    """Forget all blocks kept for reuse."""
    return ResetAnswer(reset=await state.require_serving().engine.reset_prefix_cache())


@router.get("/debug/blocks", response_model=BlocksAnswer)
async def blocks(state: State) -> Response:
    """Say of every block of the pool what it is held for. Waits for the end of the running step."""
    engine = state.require_serving().engine
    block_map = await engine.block_map()
    stats = engine.stats()
    # Many blocks make a long text.
    content = await asyncio.to_thread(
        _blocks_body, block_map, stats.prefix_cache_queries, stats.prefix_cache_hits
    )
    return Response(content, media_type="application/json")


def _blocks_body(block_map: BlockMap, num_queries: int, num_hits: int) -> bytes:
    return orjson.dumps(
        {
            "num_blocks": len(block_map.blocks),
            "num_used_blocks": sum(block.ref_count > 0 for block in block_map.blocks),
            "block_size": block_map.block_size,
            "num_wasted_slots": block_map.num_wasted_slots,
            "waste": block_map.waste,
            "prefix_cache_queries": num_queries,
            "prefix_cache_hits": num_hits,
            "blocks": [block._asdict() for block in block_map.blocks],
        }
    )


@router.post("/debug/profile", **describe_body(ProfileRequest, ProfileAnswer))
async def profile(request: Request, state: State) -> ProfileAnswer:
    """Record the next steps with torch's profiler. They are slower, and writing takes seconds."""
    state.require_serving()
    wanted = await read_fields(request, lambda _: ProfileRequest)
    if state.profiler is None:
        raise InvalidRequestError("This engine cannot be profiled")
    path = await state.profiler.record(wanted.num_steps, wanted.timeout)
    return ProfileAnswer(path=str(path), num_steps=wanted.num_steps)
