"""From a chat request to the engine, and from the engine's outputs to the answer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jinja2
import orjson

from octavo.engine.core.errors import (
    ConfigurationError,
    ContextLengthError,
    InvalidRequestError,
    UnsupportedParameterError,
)
from octavo.engine.output_processor import ChoiceOutput, TokenRecord
from octavo.server.chat_template import ChatTemplate
from octavo.server.engine_stream import GenerateRequest
from octavo.server.errors import ErrorAnswer
from octavo.server.generation import AnswerHead, RouteParams, WantedTokens
from octavo.server.logprobs import LogprobStyle, chat_content, prompt_logprobs
from octavo.server.output_stream import CollectedChoice, CollectedPrompt, OutputStream, collect
from octavo.server.protocol.chat import ChatCompletionRequest, ChatPrompt
from octavo.server.reasoning.formats import FORMATS, Phase
from octavo.server.reasoning.splitter import Reasoning
from octavo.server.rendering import render
from octavo.server.request_builder import RequestBuilder
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
        reasoning: Reasoning | None,
    ) -> None:
        self.reasoning = reasoning
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

    def _message(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        if self.reasoning is None:
            text = self.echo_text + choice.text
            return {"role": "assistant", "content": text, "refusal": None}
        splitter = self.reasoning.splitter()
        echoed = splitter.push(self.echo_text, (), last=False)
        split = echoed.joined(splitter.push(choice.text, choice.token_ids, last=True))
        self.usage.set_reasoning(index, splitter.num_tokens)
        return {
            "role": "assistant",
            "content": split.content or None,
            "refusal": None,
            # Clients know it by the one name or by the other.
            "reasoning": split.reasoning or None,
            "reasoning_content": split.reasoning or None,
        }

    def _choice(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "index": index,
            "message": self._message(index, choice),
            "logprobs": self.logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.return_token_ids:
            answer["token_ids"] = choice.token_ids
        return answer


class _ChunkState:
    """One choice of a stream."""

    __slots__ = ("prefix", "splitter", "started")

    def __init__(self, index: int, reasoning: Reasoning | None) -> None:
        self.prefix = b'{"index":%d,"delta":' % index
        self.started = False
        self.splitter = None if reasoning is None else reasoning.splitter()


_ROLE = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
_NO_LOGPROBS = b',"logprobs":null,"finish_reason":null}'


class _Delta(NamedTuple):
    """What one chunk tells: a piece of the one part or of the other, with its tokens."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenRecord]
    is_reasoning: bool = False

    def render(self) -> bytes:
        text = json_line(self.text)
        if self.is_reasoning:
            return b'{"reasoning":%b,"reasoning_content":%b}' % (text, text)
        return b'{"content":%b}' % text


class ChatChunkWriter:
    """Renders the chunks of a chat stream."""

    def __init__(self, job: ChatJob, frame: ChunkFrame) -> None:
        self._job = job
        self._frame = frame
        self._choices = [_ChunkState(index, job.reasoning) for index in range(job.n)]
        self._first = True

    def write(self, number: int, outputs: list[ChoiceOutput]) -> bytes:
        """Return the events for new outputs."""
        events: list[bytes] = []
        for output in outputs:
            self._job.usage.add(number, output)
            state = self._choices[output.index]
            echo_text = ""
            if not state.started:
                state.started = True
                events.append(self._role_chunk(state))
                echo_text = self._job.echo_text
            for delta in self._deltas(state, echo_text, output):
                choice = self._write_delta(state, delta)
                if choice is not None:
                    events.append(self._frame.chunk(choice))
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

    def _deltas(
        self, state: _ChunkState, echo_text: str, output: ChoiceOutput
    ) -> tuple[_Delta, ...]:
        ids, records = output.token_ids, output.logprobs
        if state.splitter is None:
            return (_Delta(echo_text + output.text, ids, records),)
        echoed = state.splitter.push(echo_text, (), last=False) if echo_text else None
        split = state.splitter.push(output.text, ids, last=output.finish_reason is not None)
        if echoed is not None:
            split = echoed.joined(split)
        self._job.usage.set_reasoning(output.index, state.splitter.num_tokens)
        end = split.num_tokens
        return (
            _Delta(split.reasoning, ids[:end], records[:end], is_reasoning=True),
            _Delta(split.content, ids[end:], records[end:]),
        )

    def _write_delta(self, state: _ChunkState, delta: _Delta) -> bytes | None:
        with_ids = self._job.return_token_ids and delta.token_ids
        logprobs = self._job.logprobs(delta.logprobs) if delta.logprobs else None
        if not delta.text and logprobs is None and not with_ids:
            return None
        if logprobs is None and not with_ids:
            return b"".join((state.prefix, delta.render(), _NO_LOGPROBS))
        ids = b',"token_ids":' + json_line(delta.token_ids) if with_ids else b""
        return b"".join(
            (
                *(state.prefix, delta.render(), b',"logprobs":'),
                *(json_line(logprobs), b',"finish_reason":null', ids, b"}"),
            )
        )


def _finish(state: _ChunkState, output: ChoiceOutput) -> bytes:
    return b'%b{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
        state.prefix,
        json_line(output.finish_reason),
        json_line(output.stop_reason),
    )


class _Layers(NamedTuple):
    """Variables of the template; later layers win."""

    defaults: Mapping[str, Any]
    of_fields: Mapping[str, Any]
    of_client: Mapping[str, Any]

    def merged(self) -> dict[str, Any]:
        return {**self.defaults, **self.of_fields, **self.of_client}

    def without_each_field(self) -> Iterator[tuple[str, "_Layers"]]:
        """Give each field that set variables, with what is left without it."""
        if self.of_client:
            yield "chat_template_kwargs", self._replace(of_client={})
        for name in self.of_fields:
            others = {key: value for key, value in self.of_fields.items() if key != name}
            yield name, self._replace(of_fields=others)


class EncodedMessages(NamedTuple):
    """A conversation as ids and as text, and the variables that its template was given."""

    token_ids: list[int]
    text: str
    template_kwargs: Mapping[str, Any]


class ChatService:
    """Renders and checks chat requests and makes jobs of them."""

    def __init__(self, builder: RequestBuilder) -> None:
        self._builder = builder
        self._model = builder.model
        parser = builder.config.reasoning_parser
        self._format = None if parser is None else FORMATS[parser]

    async def prepare(self, body: ChatCompletionRequest) -> ChatJob:
        """Return the job for `body`; all that can be wrong with it is found here.

        Raises ModelNotFoundError, InvalidRequestError and ContextLengthError.
        """
        name = self._builder.check(body, "top_logprobs", body.top_logprobs)
        return await self._model.text_work(self._prepare, body, AnswerHead(name, "chatcmpl"))

    def encode_messages(
        self,
        prompt: ChatPrompt,
        template_kwargs: dict[str, Any] | None = None,
        truncated: bool = False,
    ) -> EncodedMessages:
        """Render and tokenize; slow, so not for the event loop. Raises InvalidRequestError.

        `template_kwargs` are variables of the template that a field of the route stands for.
        A prompt that will be `truncated` may be longer than the context.
        """
        limit = self._model.max_model_len
        num_calls = sum(
            len(message.get("tool_calls") or ())
            for message in prompt.messages
            if message["role"] == "assistant"
        )
        if len(prompt.messages) + num_calls > limit:
            # A template would take many seconds for what no context holds.
            raise ContextLengthError(
                f"The context holds at most {limit} tokens, fewer than there are messages "
                "and tool calls",
                "messages",
            )
        layers = _Layers(
            self._builder.config.default_chat_template_kwargs or {},
            template_kwargs or {},
            prompt.chat_template_kwargs or {},
        )
        text = self._render(prompt, layers)
        token_ids = self._builder.encoder.encode(
            text, prompt.add_special_tokens, "messages", truncated
        )
        if not token_ids:
            raise InvalidRequestError("The chat template made an empty prompt", "messages")
        return EncodedMessages(token_ids, text, layers.merged())

    def _render(self, prompt: ChatPrompt, layers: _Layers) -> str:
        """Render; when it fails only with the variables of a field, that field is to blame."""
        template = self._template(prompt.chat_template)

        def render(variables: Mapping[str, Any]) -> str:
            return template.render(
                [dict(message) for message in prompt.messages],
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                kwargs=variables,
            )

        try:
            return render(layers.merged())
        except InvalidRequestError as error:
            if error.param != "messages":
                raise
            for param, rest in layers.without_each_field():
                if _succeeds(render, rest.merged()):
                    own_words = isinstance(error.__cause__, jinja2.TemplateError)
                    text = f"With this `{param}` the chat template fails"
                    text += f": {error.message}" if own_words else ""
                    raise InvalidRequestError(text, param) from error
            raise

    def reasoning_after(self, prompt: ChatPrompt, encoded: EncodedMessages) -> Reasoning | None:
        """Return how the answer's reasoning begins; None without a parser."""
        form = self._format
        if form is None:
            return None
        phase = form.phase_after_prompt(encoded.text, encoded.template_kwargs)
        if prompt.continue_final_message:
            phase = form.phase_after_message(_message_text(prompt.messages[-1]))
        return Reasoning(form, phase, self._model.tokenizer)

    def _template(self, source: str | None) -> ChatTemplate:
        if source is None:
            return self._model.chat_template
        if not self._builder.config.trust_request_chat_template:
            raise UnsupportedParameterError(
                "`chat_template` needs a server with --trust-request-chat-template",
                "chat_template",
            )
        try:
            return ChatTemplate(
                source, self._model.tokenizer, self._builder.config.chat_template_content_format
            )
        except ConfigurationError:
            raise InvalidRequestError(
                "`chat_template` is not a valid Jinja template", "chat_template"
            ) from None

    def _prepare(self, body: ChatCompletionRequest, head: AnswerHead) -> ChatJob:
        effort = body.reasoning_effort
        encoded = self.encode_messages(
            body,
            None if effort is None else {"reasoning_effort": effort},
            body.truncate_prompt_tokens is not None,
        )
        wanted = WantedTokens(body.wanted_tokens, None, "messages")
        builder, num_top = self._builder, body.top_logprobs or 0
        request = builder.build(
            f"{head.id}-0",
            builder.truncate(encoded.token_ids, body, wanted),
            body,
            wanted,
            RouteParams(
                logprobs=num_top if body.logprobs else None,
                prompt_logprobs=body.prompt_logprobs,
                bad_words_token_ids=builder.encoder.encode_bad_words(body.bad_words or ()),
            ),
        )
        style = builder.logprob_style(body, num_top) if body.logprobs else None
        reasoning = self.reasoning_after(body, encoded)
        if body.echo and reasoning is not None:
            # The text then begins with that message, which has its own opening tag.
            reasoning = replace(reasoning, phase=Phase.UNDECIDED)
        return ChatJob(body, head, request, style, reasoning)


def _succeeds(render: Callable[[Mapping[str, Any]], str], kwargs: Mapping[str, Any]) -> bool:
    try:
        render(kwargs)
    except InvalidRequestError:
        return False
    return True


def _message_text(message: Any) -> str:  # noqa: ANN401 - any of the message types
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
