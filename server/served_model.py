"""The facts of the served model that HTTP answers are made from."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from octavo.engine.core.errors import ModelNotFoundError
from octavo.engine.core.pooling import DEFAULT_EMBEDDING, EmbeddingSpec
from octavo.engine.tokenizer import Tokenizer
from octavo.server.chat_template import ChatTemplate

P = ParamSpec("P")
T = TypeVar("T")

_NUM_TEXT_THREADS = 2
"""Few: more texts at once would only take the engine's time."""


def _text_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_TEXT_THREADS, thread_name_prefix="octavo-text")


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
    _threads: ThreadPoolExecutor = field(default_factory=_text_threads, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The name that answers carry when the request names no model."""
        return self.names[0]

    async def text_work(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work`, which renders or tokenizes, in threads kept for that.

        Whatever else needs a thread, such as the answers of other requests, does not wait for it.
        """
        call = partial(copy_context().run, work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def resolve_name(self, name: str | None) -> str:
        """Return the served name for a request's `model`. Raises ModelNotFoundError."""
        if name is None:
            return self.name
        if name not in self.names:
            raise ModelNotFoundError(
                f"The model `{name[:256]}` does not exist; served: {', '.join(self.names)}", "model"
            )
        return name
