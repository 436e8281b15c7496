"""From a chat request to the engine, and from the engine's outputs to the answer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson

from octavo.config.server import ServerConfig
from octavo.engine.core.errors import (
    ConfigurationError,
    ContextLengthError,
    InvalidRequestError,
    UnsupportedParameterError,
)
from octavo.engine.core.limits import EngineLimits
from octavo.engine.output_processor import ChoiceOutput, TokenRecord
from octavo.server.async_engine import AsyncEngine, GenerateRequest
from octavo.server.chat_template import ChatTemplate
from octavo.server.errors import ErrorAnswer
from octavo.server.generation import (
    AnswerHead,
    PromptEncoder,
    RouteParams,
    WantedTokens,
    check_num_logprobs,
    check_settings,
    sampling_params,
    truncate_prompt,
)
from octavo.server.logprobs import LogprobStyle, chat_content, prompt_logprobs
from octavo.server.output_stream import CollectedChoice, CollectedPrompt, OutputStream, collect
from octavo.server.protocol.chat import ChatCompletionRequest, ChatPrompt
from octavo.server.rendering import render
from octavo.server.served_model import ServedModel
from octavo.server.streaming import ChunkFrame, json_line
from octavo.server.usage import UsageCounter

OBJECT = "chat.completion"
CHUNK_OBJECT = "chat.completion.chunk"


class ChatJob:
    """One chat request on its way through the engine."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        head: AnswerHead,
        request: GenerateRequest,
        style: LogprobStyle | None,
    ) -> None:
        self.requests: Sequence[GenerateRequest] = (request,)
        self.usage = UsageCounter([len(request.prompt_token_ids)])
        self.echo_text = _message_text(body.messages[-1]) if body.echo else ""
        self._body = body
        self._head = head
        self._request = request
        self._style = style

    async def answer(self, outputs: OutputStream) -> bytes:
        """Read all outputs and return the body of the plain answer."""
        (collected,) = await collect(outputs, self.requests, self.usage)
        return await render(partial(self._render, collected), collected.num_records())

    def _render(self, collected: CollectedPrompt) -> bytes:
        answer = self._head.fields(OBJECT)
        answer["choices"] = [
            self._choice(index, choice) for index, choice in enumerate(collected.choices)
        ]
        answer["usage"] = self.usage.as_dict()
        num_top = self._body.prompt_logprobs
        if num_top is not None:
            answer["prompt_logprobs"] = prompt_logprobs(collected.prompt_logprobs or (), num_top)
        if self.return_token_ids:
            answer["prompt_token_ids"] = self._request.prompt_token_ids
        return orjson.dumps(answer)

    def writer(self) -> "ChatChunkWriter":
        """Return what renders the stream."""
        frame = ChunkFrame(
            self._head,
            CHUNK_OBJECT,
            self.usage,
            self._body.include_usage,
            self._body.continuous_usage,
        )
        return ChatChunkWriter(self, frame)

    @property
    def n(self) -> int:
        """Choices."""
        return self._body.n

    @property
    def return_token_ids(self) -> bool:
        """True when token ids belong into the answer."""
        return self._body.return_token_ids

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The rendered prompt."""
        return self._request.prompt_token_ids

    def logprobs(self, records: Sequence[TokenRecord]) -> dict[str, Any] | None:
        """Return the `logprobs` object for some tokens; None if not asked for."""
        if self._style is None:
            return None
        return {"content": chat_content(records, self._style), "refusal": None}

    def _choice(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": self.echo_text + choice.text,
                "refusal": None,
            },
            "logprobs": self.logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.return_token_ids:
            answer["token_ids"] = choice.token_ids
        return answer


class _ChunkState:
    """One choice of a stream."""

    __slots__ = ("prefix", "started")

    def __init__(self, index: int) -> None:
        self.prefix = b'{"index":%d,"delta":' % index
        self.started = False


_ROLE = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
_CONTENT = b'{"content":'
_NO_LOGPROBS = b'},"logprobs":null,"finish_reason":null}'


class ChatChunkWriter:
    """Renders the chunks of a chat stream."""

    def __init__(self, job: ChatJob, frame: ChunkFrame) -> None:
        self._job = job
        self._frame = frame
        self._choices = [_ChunkState(index) for index in range(job.n)]
        self._first = True

    def write(self, number: int, outputs: list[ChoiceOutput]) -> bytes:
        """Return the events for new outputs."""
        events: list[bytes] = []
        for output in outputs:
            self._job.usage.add(number, output)
            state = self._choices[output.index]
            text = output.text
            if not state.started:
                state.started = True
                events.append(self._role_chunk(state))
                text = self._job.echo_text + text
            delta = self._delta(state, text, output)
            if delta is not None:
                events.append(self._frame.chunk(delta))
            if output.finish_reason is not None:
                events.append(self._frame.chunk(_finish(state, output)))
        return b"".join(events)

    def last(self) -> bytes:
        """Return the events that end the stream."""
        return self._frame.last()

    def failed(self, error: ErrorAnswer) -> bytes:
        """Return the event that ends a stream which breaks off."""
        return error.event()

    def _role_chunk(self, state: _ChunkState) -> bytes:
        more = b""
        if self._first and self._job.return_token_ids:
            more = b',"prompt_token_ids":' + json_line(self._job.prompt_token_ids)
        self._first = False
        return self._frame.chunk(state.prefix + _ROLE, more)

    def _delta(self, state: _ChunkState, text: str, output: ChoiceOutput) -> bytes | None:
        with_ids = self._job.return_token_ids and output.token_ids
        logprobs = self._job.logprobs(output.logprobs) if output.logprobs else None
        if not text and logprobs is None and not with_ids:
            return None
        if logprobs is None and not with_ids:
            return b"".join((state.prefix, _CONTENT, json_line(text), _NO_LOGPROBS))
        ids = b',"token_ids":' + json_line(output.token_ids) if with_ids else b""
        return b"".join(
            (
                *(state.prefix, _CONTENT, json_line(text), b'},"logprobs":'),
                *(json_line(logprobs), b',"finish_reason":null', ids, b"}"),
            )
        )


def _finish(state: _ChunkState, output: ChoiceOutput) -> bytes:
    return b'%b{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
        state.prefix,
        json_line(output.finish_reason),
        json_line(output.stop_reason),
    )


class ChatService:
    """Renders and checks chat requests and makes jobs of them."""

    def __init__(
        self,
        engine: AsyncEngine,
        model: ServedModel,
        limits: EngineLimits,
        config: ServerConfig,
        priority_scheduling: bool = False,
    ) -> None:
        self.engine = engine
        self._model = model
        self._limits = limits
        self._config = config
        self._priority_scheduling = priority_scheduling
        self._encoder = PromptEncoder(model)

    async def prepare(self, body: ChatCompletionRequest) -> ChatJob:
        """Return the job for `body`; all that can be wrong with it is found here.

        Raises ModelNotFoundError, InvalidRequestError and ContextLengthError.
        """
        head = AnswerHead(self._model.resolve_name(body.model), "chatcmpl")
        check_settings(body, self._model, self._config, self._priority_scheduling)
        check_num_logprobs("top_logprobs", body.top_logprobs, self._config)
        return await self._model.text_work(self._prepare, body, head)

    def encode_messages(
        self, prompt: ChatPrompt, template_kwargs: dict[str, Any] | None = None
    ) -> list[int]:
        """Render and tokenize; slow, so not for the event loop. Raises InvalidRequestError.

        `template_kwargs` are variables of the template that a field of the route stands for.
        """
        limit = self._model.max_model_len
        if len(prompt.messages) > limit:
            # A template would take many seconds for what no context holds.
            raise ContextLengthError(
                f"The context holds at most {limit} tokens, fewer than there are messages",
                "messages",
            )
        kwargs = dict(self._config.default_chat_template_kwargs or {})
        kwargs |= (template_kwargs or {}) | (prompt.chat_template_kwargs or {})
        text = self._template(prompt.chat_template).render(
            [dict(message) for message in prompt.messages],
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            kwargs=kwargs,
        )
        token_ids = self._encoder.encode(text, prompt.add_special_tokens, "messages")
        if not token_ids:
            raise InvalidRequestError("The chat template made an empty prompt", "messages")
        return token_ids

    def _template(self, source: str | None) -> ChatTemplate:
        if source is None:
            return self._model.chat_template
        if not self._config.trust_request_chat_template:
            raise UnsupportedParameterError(
                "`chat_template` needs a server with --trust-request-chat-template",
                "chat_template",
            )
        try:
            return ChatTemplate(
                source, self._model.tokenizer, self._config.chat_template_content_format
            )
        except ConfigurationError:
            raise InvalidRequestError(
                "`chat_template` is not a valid Jinja template", "chat_template"
            ) from None

    def _prepare(self, body: ChatCompletionRequest, head: AnswerHead) -> ChatJob:
        effort = body.reasoning_effort
        token_ids = self.encode_messages(
            body, None if effort is None else {"reasoning_effort": effort}
        )
        limit = self._model.max_model_len
        wanted = WantedTokens(body.wanted_tokens, None, "messages")
        token_ids = truncate_prompt(token_ids, body, wanted, limit)
        params = sampling_params(
            body,
            self._model,
            RouteParams(
                max_tokens=wanted.resolve(len(token_ids), limit, self._config.clamp_max_tokens),
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                prompt_logprobs=body.prompt_logprobs,
                bad_words_token_ids=self._encoder.encode_bad_words(body.bad_words or ()),
            ),
        )
        self._limits.check_beams(len(token_ids), params)
        request = GenerateRequest(
            request_id=f"{head.id}-0",
            prompt_token_ids=tuple(token_ids),
            params=params,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
        return ChatJob(body, head, request, self._style(body))

    def _style(self, body: ChatCompletionRequest) -> LogprobStyle | None:
        if not body.logprobs:
            return None
        as_ids = body.return_tokens_as_token_ids
        return LogprobStyle(
            num_top=body.top_logprobs or 0,
            as_token_ids=self._config.return_tokens_as_token_ids if as_ids is None else as_ids,
            hidden_ids=frozenset(),
        )


def _message_text(message: Any) -> str:  # noqa: ANN401 - any of the message types
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
