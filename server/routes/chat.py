"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.chat_service import ChatJob
from octavo.server.openapi import describe_body
from octavo.server.protocol.chat import ChatCompletion, ChatCompletionRequest
from octavo.server.routes.generation import generate
from octavo.server.state import Serving

router = APIRouter(tags=["generation"])


async def _prepare(serving: Serving, body: ChatCompletionRequest) -> ChatJob:
    return await serving.chat.prepare(body)


@router.post(
    "/v1/chat/completions", **describe_body(ChatCompletionRequest, ChatCompletion, streams=True)
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    return await generate(request, ChatCompletionRequest, _prepare)
