"""The facts of the served model that HTTP answers are made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.engine.core.errors import ModelNotFoundError
from octavo.engine.core.pooling import DEFAULT_EMBEDDING, EmbeddingSpec
from octavo.engine.tokenizer import Tokenizer
from octavo.server.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Fixed once the model is loaded.

    `names` are the values of `model` that are accepted, the first being the default. `root` is
    what was loaded. `created` is unix seconds. `default_sampling_params` holds the checkpoint's
    own defaults under the names of the HTTP fields. `embedding` says how it makes embeddings, and
    `generates` whether it makes texts too.
    """

    names: tuple[str, ...]
    root: str
    created: int
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    default_sampling_params: Mapping[str, Any]
    embedding: EmbeddingSpec = DEFAULT_EMBEDDING
    generates: bool = True

    @property
    def name(self) -> str:
        """The name that answers carry when the request names no model."""
        return self.names[0]

    def resolve_name(self, name: str | None) -> str:
        """Return the served name for a request's `model`. Raises ModelNotFoundError."""
        if name is None:
            return self.name
        if name not in self.names:
            raise ModelNotFoundError(
                f"The model `{name[:256]}` does not exist; served: {', '.join(self.names)}", "model"
            )
        return name
