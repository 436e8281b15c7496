"""From a request for a response to the engine, and from the engine's outputs to the answer."""

import time
import uuid
from collections.abc import Sequence

import orjson

from octavo.engine.core.errors import ContextLengthError, InvalidRequestError
from octavo.engine.core.sampling_params import SamplingParams
from octavo.server.chat_service import ChatService, EncodedMessages
from octavo.server.engine_stream import GenerateRequest
from octavo.server.generation import RouteParams, WantedTokens
from octavo.server.output_stream import CollectedChoice, OutputStream, collect
from octavo.server.protocol.chat import ChatPrompt
from octavo.server.protocol.responses import ResponsesRequest
from octavo.server.reasoning.splitter import Reasoning
from octavo.server.rendering import render
from octavo.server.request_builder import RequestBuilder
from octavo.server.response_events import ResponseEventWriter
from octavo.server.response_input import to_messages
from octavo.server.response_objects import Answer, JsonDict, ResponseObjects
from octavo.server.usage import UsageCounter


class ResponseJob:
    """One request on its way through the engine."""

    def __init__(
        self, objects: ResponseObjects, request: GenerateRequest, reasoning: Reasoning | None
    ) -> None:
        self.requests: Sequence[GenerateRequest] = (request,)
        self._objects = objects
        self._answer = Answer(reasoning, objects.usage)

    async def answer(self, outputs: OutputStream) -> bytes:
        """Read all outputs and return the body of the plain answer."""
        (collected,) = await collect(outputs, self.requests, self._objects.usage)
        (choice,) = collected.choices
        return await render(lambda: self._render(choice), collected.num_records())

    def writer(self) -> ResponseEventWriter:
        """Return what renders the stream."""
        return ResponseEventWriter(self._objects, self._answer)

    def _render(self, choice: CollectedChoice) -> bytes:
        self._answer.add(choice)
        return orjson.dumps(self._objects.ended(self._answer))


class ResponsesService:
    """Checks requests for responses and makes jobs of them."""

    def __init__(self, builder: RequestBuilder, chat: ChatService) -> None:
        self._builder = builder
        self._chat = chat

    async def prepare(self, body: ResponsesRequest) -> ResponseJob:
        """Return the job for `body`; all that can be wrong with it is found here.

        Raises ModelNotFoundError, InvalidRequestError and ContextLengthError.
        """
        name = self._builder.check(body, "top_logprobs", body.top_logprobs)
        return await self._builder.model.text_work(self._prepare, body, name)

    def _prepare(self, body: ResponsesRequest, name: str) -> ResponseJob:
        builder = self._builder
        prompt = ChatPrompt(
            messages=to_messages(body.instructions, body.input),
            chat_template_kwargs=body.chat_template_kwargs,
        )
        encoded = self._encode(prompt, body)
        wanted = WantedTokens(body.max_output_tokens, None, "input")
        request = builder.build(
            f"resp-{uuid.uuid4().hex}",
            builder.truncate(encoded.token_ids, body, wanted),
            body,
            wanted,
            RouteParams(
                logprobs=body.num_logprobs,
                bad_words_token_ids=builder.encoder.encode_bad_words(body.bad_words or ()),
            ),
        )
        objects = ResponseObjects(
            fixed={
                "id": f"resp_{uuid.uuid4().hex}",
                "object": "response",
                "created_at": int(time.time()),
                "model": name,
                **_echoed(body, request.params),
            },
            style=builder.logprob_style(body, body.num_logprobs or 0),
            usage=UsageCounter([len(request.prompt_token_ids)]),
        )
        return ResponseJob(objects, request, self._chat.reasoning_after(prompt, encoded))

    def _encode(self, prompt: ChatPrompt, body: ResponsesRequest) -> EncodedMessages:
        effort = body.reasoning.effort if body.reasoning is not None else None
        try:
            return self._chat.encode_messages(
                prompt,
                None if effort is None else {"reasoning_effort": effort},
                body.truncate_prompt_tokens is not None,
            )
        except (InvalidRequestError, ContextLengthError) as error:
            names = {"messages": "input", "reasoning_effort": "reasoning"}
            param = names.get(error.param or "", error.param)
            message = error.message.replace("`reasoning_effort`", "`reasoning`")
            raise type(error)(message, param) from None


def _echoed(body: ResponsesRequest, params: SamplingParams) -> JsonDict:
    """The settings as they were understood."""
    reasoning = body.reasoning
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": {"type": "text"}},
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "tools": [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls,
        "truncation": "disabled",
        "store": body.store,
        "metadata": body.metadata or {},
        "background": False,
        "previous_response_id": None,
    }
