"""POST /v1/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.completion_service import CompletionJob
from octavo.server.openapi import describe_body
from octavo.server.protocol.completion import Completion, CompletionRequest
from octavo.server.routes.generation import generate
from octavo.server.state import Serving

router = APIRouter(tags=["generation"])


async def _prepare(serving: Serving, body: CompletionRequest) -> CompletionJob:
    return await serving.completions.prepare(body)


@router.post("/v1/completions", **describe_body(CompletionRequest, Completion, streams=True))
async def create_completion(request: Request) -> Response:
    """Continue one prompt or a batch of prompts."""
    return await generate(
        request, CompletionRequest, _prepare, num_prompts=lambda body: len(body.prompt)
    )
