"""From an embedding request to the engine, and from its vectors to the answer."""

import asyncio
import base64
import contextlib
import uuid
from collections.abc import Sequence

import numpy as np
import orjson

from octavo.engine.core.errors import (
    ContextLengthError,
    InvalidRequestError,
    RequestFailedError,
    UnsupportedParameterError,
)
from octavo.engine.core.pooling import Embedding
from octavo.engine.core.sampling_params import SamplingParams
from octavo.server.async_engine import AsyncEngine
from octavo.server.engine_stream import GenerateRequest
from octavo.server.generation import PromptEncoder, longest_first
from octavo.server.protocol.embedding import EmbeddingRequest
from octavo.server.served_model import ServedModel


class EmbeddingService:
    """Answers embedding requests. At most `max_open` inputs of each are in the engine at once."""

    def __init__(self, engine: AsyncEngine, model: ServedModel, max_open: int) -> None:
        self.max_open = max_open
        self._engine = engine
        self._model = model
        self._encoder = PromptEncoder(model)

    async def answer(self, body: EmbeddingRequest) -> bytes:
        """Return the body of the answer.

        Raises ModelNotFoundError, InvalidRequestError, ContextLengthError and what the engine
        raises.
        """
        name = self._model.resolve_name(body.model)
        self._check_dimensions(body.dimensions)
        prompts = await self._model.text_work(self._encode, body)
        vectors = await self._embed(prompts)
        num_tokens = sum(map(len, prompts))
        return await asyncio.to_thread(_render, name, vectors, body, num_tokens)

    def _check_dimensions(self, dimensions: int | None) -> None:
        allowed = self._model.embedding.dimensions
        if dimensions is None or dimensions in allowed:
            return
        if not allowed:
            raise UnsupportedParameterError(
                "`dimensions` is not supported: this model declares none that its vectors could "
                "be cut to",
                "dimensions",
            )
        known = f"{min(allowed)} to {max(allowed)}" if isinstance(allowed, range) else str(allowed)
        raise InvalidRequestError(f"`dimensions` must be one of {known}", "dimensions")

    def _encode(self, body: EmbeddingRequest) -> list[tuple[int, ...]]:
        limit = self._model.max_model_len
        inputs: Sequence[str | list[int]] = body.input
        prompts = {}
        for place in longest_first(inputs):
            token_ids = self._token_ids(place, inputs[place], body.add_special_tokens)
            if len(token_ids) > limit:
                raise ContextLengthError(
                    f"The context holds at most {limit} tokens, but `input[{place}]` has "
                    f"{len(token_ids)}",
                    "input",
                )
            prompts[place] = tuple(token_ids)
        return [prompts[place] for place in range(len(prompts))]

    def _token_ids(self, place: int, value: str | list[int], add_special_tokens: bool) -> list[int]:
        if isinstance(value, str):
            token_ids = self._encoder.encode(value, add_special_tokens, "input")
            if not token_ids:
                raise InvalidRequestError(f"`input[{place}]` holds no token", "input")
            return token_ids
        if min(value) < 0 or max(value) >= self._model.vocab_size:
            raise InvalidRequestError(
                f"`input` must hold token ids from 0 to {self._model.vocab_size - 1}", "input"
            )
        return value

    async def _embed(self, prompts: Sequence[tuple[int, ...]]) -> list[Embedding]:
        request_id = f"embd-{uuid.uuid4().hex}"
        params = SamplingParams(max_tokens=0, pooling=self._model.embedding.pooling)
        places = asyncio.Semaphore(self.max_open)

        async def embed_one(number: int, prompt: tuple[int, ...]) -> Embedding:
            async with places:
                request = GenerateRequest(f"{request_id}-{number}", prompt, params)
                return await self._run(request)

        tasks = [
            asyncio.create_task(embed_one(number, prompt)) for number, prompt in enumerate(prompts)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # One that failed leaves the others running, and so does a client that went away.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, request: GenerateRequest) -> Embedding:
        embedding: Embedding | None = None
        async with contextlib.aclosing(self._engine.generate(request)) as batches:
            async for outputs in batches:
                embedding = outputs[-1].embedding
        if embedding is None:
            raise RequestFailedError("The model made no embedding")
        return embedding


def _render(
    name: str, vectors: Sequence[Embedding], body: EmbeddingRequest, num_tokens: int
) -> bytes:
    items = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, _write(vector, body))
        for index, vector in enumerate(vectors)
    )
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (
        items,
        orjson.dumps(name),
        orjson.dumps(usage),
    )


def _write(vector: Embedding, body: EmbeddingRequest) -> bytes:
    if body.dimensions is not None:
        vector = vector[: body.dimensions]
        vector = vector / max(np.linalg.norm(vector), np.finfo(np.float32).tiny)
    if body.encoding_format == "float":
        return orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)
    return b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())
