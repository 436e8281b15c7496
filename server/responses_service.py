"""From a request for a response to the engine, and from the engine's outputs to the answer."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ContextLengthError, InvalidRequestError
from octavo.engine.core.request import FinishReason
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.output_processor import ChoiceOutput, TokenRecord
from octavo.server.async_engine import GenerateRequest
from octavo.server.chat_service import ChatService
from octavo.server.errors import ErrorAnswer
from octavo.server.generation import (
    PromptEncoder,
    RouteParams,
    WantedTokens,
    check_num_logprobs,
    check_settings,
    sampling_params,
    truncate_prompt,
)
from octavo.server.logprobs import LogprobStyle, chat_content
from octavo.server.output_stream import CollectedChoice, OutputStream, collect
from octavo.server.protocol.chat import ChatPrompt
from octavo.server.protocol.responses import ResponsesRequest
from octavo.server.rendering import render
from octavo.server.response_input import to_messages
from octavo.server.served_model import ServedModel
from octavo.server.streaming import json_line
from octavo.server.usage import UsageCounter

JsonDict = dict[str, Any]


class ResponseJob:
    """One request on its way through the engine."""

    def __init__(
        self, body: ResponsesRequest, name: str, request: GenerateRequest, style: LogprobStyle
    ) -> None:
        self.requests: Sequence[GenerateRequest] = (request,)
        self.usage = UsageCounter([len(request.prompt_token_ids)])
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self._fixed = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": name,
            **_echoed(body, request.params),
        }
        self._style = style

    async def answer(self, outputs: OutputStream) -> bytes:
        """Read all outputs and return the body of the plain answer."""
        (collected,) = await collect(outputs, self.requests, self.usage)
        (choice,) = collected.choices
        return await render(lambda: orjson.dumps(self.ended(choice)), collected.num_records())

    def writer(self) -> "ResponseEventWriter":
        """Return what renders the stream."""
        return ResponseEventWriter(self)

    def response(self, status: str, output: list[JsonDict], **fields: Any) -> JsonDict:  # noqa: ANN401 - JSON
        """Return the response object; without `fields` nothing has ended yet."""
        open_ends = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._fixed, "status": status, "output": output, **open_ends, **fields}

    def ended(self, choice: CollectedChoice) -> JsonDict:
        """Return the response object of a text that has come to its end."""
        status = end_status(choice)
        cut = status == "incomplete"
        return self.response(
            status,
            [self.item(status, [self.part(choice)])],
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage=self._usage(),
        )

    def failed(self, error: ErrorAnswer, choice: CollectedChoice) -> JsonDict:
        """Return the response object of a text that broke off."""
        return self.response(
            "failed",
            [self.item("incomplete", [self.part(choice)])],
            error={"code": error.type, "message": error.message},
        )

    def item(self, status: str, content: list[JsonDict]) -> JsonDict:
        """Return the output item, a message."""
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def part(self, choice: CollectedChoice) -> JsonDict:
        """Return the one part of the message."""
        return {
            "type": "output_text",
            "text": choice.text,
            "annotations": [],
            "logprobs": self.logprobs(choice.logprobs),
        }

    def logprobs(self, records: Sequence[TokenRecord]) -> list[JsonDict]:
        """Return the entries of some tokens; none if not asked for."""
        return chat_content(records, self._style)

    def _usage(self) -> JsonDict:
        usage = self.usage.as_dict()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def end_status(choice: CollectedChoice) -> str:
    """The status of the response and of its message."""
    return "incomplete" if choice.finish_reason is FinishReason.LENGTH else "completed"


class ResponseEventWriter:
    """Renders the events of a stream; each carries its type twice and a number."""

    def __init__(self, job: ResponseJob) -> None:
        self._job = job
        self._choice = CollectedChoice()
        self._num_events = 0
        self._place = {"item_id": job.item_id, "output_index": 0, "content_index": 0}

    def write(self, number: int, outputs: list[ChoiceOutput]) -> bytes:
        """Return the events for new outputs."""
        events: list[bytes] = []
        for output in outputs:
            self._job.usage.add(number, output)
            if self._num_events == 0:
                events += self._first_events()
            self._choice.add(output)
            if output.text or output.logprobs:
                events.append(
                    self._event(
                        "response.output_text.delta",
                        **self._place,
                        delta=output.text,
                        logprobs=self._job.logprobs(output.logprobs),
                    )
                )
        return b"".join(events)

    def last(self) -> bytes:
        """Return the events that end the stream."""
        job, choice = self._job, self._choice
        status = end_status(choice)
        part = job.part(choice)
        return b"".join(
            (
                self._event(
                    "response.output_text.done",
                    **self._place,
                    text=part["text"],
                    logprobs=part["logprobs"],
                ),
                self._event("response.content_part.done", **self._place, part=part),
                self._event(
                    "response.output_item.done", output_index=0, item=job.item(status, [part])
                ),
                self._event(f"response.{status}", response=job.ended(choice)),
            )
        )

    def failed(self, error: ErrorAnswer) -> bytes:
        """Return the event of a stream that breaks off."""
        return self._event("response.failed", response=self._job.failed(error, self._choice))

    def _first_events(self) -> list[bytes]:
        job = self._job
        begun = job.response("in_progress", [])
        empty = job.part(self._choice)
        item = job.item("in_progress", [])
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=empty),
        ]

    def _event(self, kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - JSON
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_line(data))


class ResponsesService:
    """Checks requests for responses and makes jobs of them."""

    def __init__(
        self,
        chat: ChatService,
        model: ServedModel,
        config: ServerConfig,
        priority_scheduling: bool = False,
    ) -> None:
        self._chat = chat
        self._model = model
        self._config = config
        self._priority_scheduling = priority_scheduling
        self._encoder = PromptEncoder(model)

    async def prepare(self, body: ResponsesRequest) -> ResponseJob:
        """Return the job for `body`; all that can be wrong with it is found here.

        Raises ModelNotFoundError, InvalidRequestError and ContextLengthError.
        """
        name = self._model.resolve_name(body.model)
        check_settings(body, self._model, self._config, self._priority_scheduling)
        check_num_logprobs("top_logprobs", body.top_logprobs, self._config)
        return await self._model.text_work(self._prepare, body, name)

    def _prepare(self, body: ResponsesRequest, name: str) -> ResponseJob:
        limit = self._model.max_model_len
        wanted = WantedTokens(body.max_output_tokens, None, "input")
        token_ids = truncate_prompt(self._encode(body), body, wanted, limit)
        params = sampling_params(
            body,
            self._model,
            RouteParams(
                max_tokens=wanted.resolve(len(token_ids), limit, self._config.clamp_max_tokens),
                logprobs=body.num_logprobs,
                bad_words_token_ids=self._encoder.encode_bad_words(body.bad_words or ()),
            ),
        )
        request = GenerateRequest(
            request_id=f"resp-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(token_ids),
            params=params,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
        as_ids = body.return_tokens_as_token_ids
        style = LogprobStyle(
            num_top=body.num_logprobs or 0,
            as_token_ids=self._config.return_tokens_as_token_ids if as_ids is None else as_ids,
            hidden_ids=frozenset(),
        )
        return ResponseJob(body, name, request, style)

    def _encode(self, body: ResponsesRequest) -> list[int]:
        prompt = ChatPrompt(
            messages=to_messages(body.instructions, body.input),
            chat_template_kwargs=body.chat_template_kwargs,
        )
        effort = body.reasoning.effort if body.reasoning is not None else None
        try:
            return self._chat.encode_messages(
                prompt, None if effort is None else {"reasoning_effort": effort}
            )
        except (InvalidRequestError, ContextLengthError) as error:
            param = "input" if error.param == "messages" else error.param
            raise type(error)(error.message, param) from None


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
