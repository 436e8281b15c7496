"""Routes for the operator: there only with --enable-admin, and behind a key of their own."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from octavo.engine.core.errors import AdminKeyError, InvalidRequestError
from octavo.server.context import current_request
from octavo.server.openapi import ERROR_RESPONSES, describe_body
from octavo.server.protocol.common import RequestBody
from octavo.server.state import AppState, get_state
from octavo.server.validation.fields import read_fields


async def require_admin() -> None:
    """Raise AdminKeyError unless the admin key came along."""
    if not current_request().is_admin:
        raise AdminKeyError("This route needs the admin key")


router = APIRouter(tags=["admin"], responses=ERROR_RESPONSES, dependencies=[Depends(require_admin)])
State = Annotated[AppState, Depends(get_state)]


class ResetAnswer(BaseModel):
    """Whether the prefix cache was emptied; it is not while any sequence holds a block."""

    reset: bool


class BlocksAnswer(BaseModel):
    """The state of the block pool after the last step."""

    num_blocks: int
    num_used_blocks: int
    block_size: int
    prefix_cache_queries: int
    prefix_cache_hits: int


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


@router.get("/debug/blocks")
async def blocks(state: State) -> BlocksAnswer:
    """Say how the block pool is used."""
    serving = state.require_serving()
    stats = serving.engine.stats()
    return BlocksAnswer(
        num_blocks=stats.num_blocks,
        num_used_blocks=stats.num_used_blocks,
        block_size=serving.limits.block_size,
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
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
