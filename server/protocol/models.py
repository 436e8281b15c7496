"""Bodies of /v1/models."""

from typing import Literal

from pydantic import BaseModel

from octavo.server.protocol.common import JsonObject


class ModelCard(BaseModel):
    """One name under which the model is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["octavo"] = "octavo"
    root: str
    parent: None = None
    max_model_len: int
    default_sampling_params: JsonObject


class ModelList(BaseModel):
    """All names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
