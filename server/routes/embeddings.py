"""POST /v1/embeddings."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.disconnect import run_until_disconnect
from octavo.server.openapi import describe_body
from octavo.server.protocol.embedding import EmbeddingList, EmbeddingRequest
from octavo.server.state import get_state
from octavo.server.validation.fields import read_fields

router = APIRouter(tags=["embeddings"])


@router.post("/v1/embeddings", **describe_body(EmbeddingRequest, EmbeddingList))
async def create_embeddings(request: Request) -> Response:
    """Return a vector for each input."""
    serving = get_state(request).require_serving()
    service = serving.embeddings
    with serving.admission.admit() as ticket:
        body = await read_fields(request, lambda _: EmbeddingRequest)
        # No more of them are in the engine at once.
        ticket.resize(min(len(body.input), service.max_open), "input")
        answer = await run_until_disconnect(request, service.answer(body))
    return Response(answer, media_type="application/json")
