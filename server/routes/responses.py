"""POST /v1/responses. Nothing is kept, so there is no path for a single response."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.openapi import describe_body
from octavo.server.protocol.responses import ResponseObject, ResponsesRequest
from octavo.server.responses_service import ResponseJob
from octavo.server.routes.generation import generate
from octavo.server.state import Serving

router = APIRouter(tags=["generation"])


async def _prepare(serving: Serving, body: ResponsesRequest) -> ResponseJob:
    return await serving.responses.prepare(body)


@router.post("/v1/responses", **describe_body(ResponsesRequest, ResponseObject, streams=True))
async def create_response(request: Request) -> Response:
    """Answer the items of a conversation."""
    return await generate(request, ResponsesRequest, _prepare)
