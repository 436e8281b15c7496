"""GET /v1/models and /v1/models/{id}."""

from fastapi import APIRouter
from starlette.requests import Request

from octavo.server.openapi import ERROR_RESPONSES
from octavo.server.protocol.models import ModelCard, ModelList
from octavo.server.served_model import ServedModel
from octavo.server.state import get_state

router = APIRouter(tags=["models"], responses=ERROR_RESPONSES)


def _card(model: ServedModel, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=model.created,
        root=model.root,
        max_model_len=model.max_model_len,
        default_sampling_params=dict(model.default_sampling_params),
    )


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """List the names under which the model is served."""
    model = get_state(request).require_serving().model
    return ModelList(data=[_card(model, name) for name in model.names])


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> ModelCard:
    """Describe one of the served names."""
    model = get_state(request).require_serving().model
    return _card(model, model.resolve_name(model_id))
