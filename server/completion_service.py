"""From a completion request to the engine, and from the engine's outputs to the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from octavo.engine.core.errors import InvalidRequestError
from octavo.engine.output_processor import ChoiceOutput, PromptRecords, TokenRecord
from octavo.engine.tokenizer import Tokenizer
from octavo.server.engine_stream import GenerateRequest
from octavo.server.errors import ErrorAnswer
from octavo.server.generation import (
    MAX_TRUNCATED_CHARS,
    AnswerHead,
    RouteParams,
    WantedTokens,
    longest_first,
)
from octavo.server.logprobs import CompletionLogprobs, LogprobStyle, prompt_logprobs
from octavo.server.output_stream import CollectedChoice, CollectedPrompt, OutputStream, collect
from octavo.server.protocol.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from octavo.server.rendering import render
from octavo.server.request_builder import RequestBuilder
from octavo.server.streaming import ChunkFrame, json_line
from octavo.server.usage import UsageCounter

OBJECT = "text_completion"


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """One prompt. `echo_text` is what its choices' texts begin with."""

    token_ids: tuple[int, ...]
    echo_text: str


class CompletionJob:
    """One completion request on its way through the engine."""

    def __init__(
        self,
        body: CompletionRequest,
        head: AnswerHead,
        prompts: Sequence[CompletionPrompt],
        requests: Sequence[GenerateRequest],
        style: LogprobStyle | None,
        tokenizer: Tokenizer,
    ) -> None:
        self.requests = requests
        self.usage = UsageCounter([len(prompt.token_ids) for prompt in prompts])
        self._body = body
        self._head = head
        self._prompts = prompts
        self._style = style
        self._tokenizer = tokenizer

    async def answer(self, outputs: OutputStream) -> bytes:
        """Read all outputs and return the body of the plain answer."""
        collected = await collect(outputs, self.requests, self.usage)
        num_records = sum(prompt.num_records() for prompt in collected)
        return await render(partial(self._render, collected), num_records)

    def _render(self, collected: Sequence[CollectedPrompt]) -> bytes:
        choices = [
            self._choice(number * self._body.n + place, number, choice, result)
            for number, result in enumerate(collected)
            for place, choice in enumerate(_best(result.choices, self._body.n))
        ]
        return orjson.dumps(
            self._head.fields(OBJECT) | {"choices": choices, "usage": self.usage.as_dict()}
        )

    def writer(self) -> "CompletionChunkWriter":
        """Return what renders the stream."""
        frame = ChunkFrame(
            self._head, OBJECT, self.usage, self._body.include_usage, self._body.continuous_usage
        )
        return CompletionChunkWriter(self, frame)

    def _choice(
        self, index: int, number: int, choice: CollectedChoice, result: CollectedPrompt
    ) -> dict[str, Any]:
        logprobs = self.new_logprobs(number, result.prompt_logprobs)
        if logprobs is not None:
            logprobs.add(choice.logprobs)
        answer: dict[str, Any] = {
            "index": index,
            "text": self._prompts[number].echo_text + choice.text,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "logprobs": None if logprobs is None else logprobs.take(),
        }
        num_top = self._body.prompt_logprobs
        if num_top is not None:
            answer["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs or (), num_top)
        if self._body.return_token_ids:
            answer["token_ids"] = choice.token_ids
            answer["prompt_token_ids"] = self._prompts[number].token_ids
        return answer

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self._body.n

    @property
    def return_token_ids(self) -> bool:
        """True when token ids belong into the answer."""
        return self._body.return_token_ids

    def prompt(self, number: int) -> CompletionPrompt:
        """Return the prompt with this number."""
        return self._prompts[number]

    def new_logprobs(self, number: int, records: PromptRecords | None) -> CompletionLogprobs | None:
        """Return the lists of a choice, with the prompt's tokens in them after an echo."""
        if self._style is None:
            return None
        logprobs = CompletionLogprobs(self._style)
        if self._body.echo:
            prompt = self._prompts[number]
            first = _first_token(prompt.token_ids[0], self._tokenizer)
            logprobs.add_prompt(first, records or (), prompt.echo_text)
        return logprobs


class _ChunkState:
    """One choice of a stream."""

    __slots__ = ("logprobs", "prefix", "started")

    def __init__(self, index: int) -> None:
        self.prefix = b'{"index":%d,"text":' % index
        self.started = False
        self.logprobs: CompletionLogprobs | None = None


class CompletionChunkWriter:
    """Renders the chunks of a completion stream."""

    def __init__(self, job: CompletionJob, frame: ChunkFrame) -> None:
        self._job = job
        self._frame = frame
        self._choices = [_ChunkState(index) for index in range(len(job.requests) * job.n)]
        self._prompt_records: dict[int, PromptRecords] = {}

    def write(self, number: int, outputs: list[ChoiceOutput]) -> bytes:
        """Return the events for new outputs of one prompt."""
        events = []
        for output in outputs:
            self._job.usage.add(number, output)
            if output.prompt_logprobs is not None:
                self._prompt_records[number] = output.prompt_logprobs
            choice = self._write_choice(number, output)
            if choice is not None:
                events.append(self._frame.chunk(choice))
        return b"".join(events)

    def last(self) -> bytes:
        """Return the events that end the stream."""
        return self._frame.last()

    def failed(self, error: ErrorAnswer) -> bytes:
        """Return the event that ends a stream which breaks off."""
        return error.event()

    def _write_choice(self, number: int, output: ChoiceOutput) -> bytes | None:
        state = self._choices[number * self._job.n + output.index]
        text, more = output.text, b""
        if not state.started:
            state.started = True
            state.logprobs = self._job.new_logprobs(number, self._prompt_records.get(number))
            prompt = self._job.prompt(number)
            text = prompt.echo_text + text
            if self._job.return_token_ids:
                more = b',"prompt_token_ids":' + json_line(prompt.token_ids)
        logprobs = b"null"
        if state.logprobs is not None:
            state.logprobs.add(output.logprobs)
            if state.logprobs.tokens:
                logprobs = json_line(state.logprobs.take())
        if self._job.return_token_ids:
            more += b',"token_ids":' + json_line(output.token_ids)
        if output.finish_reason is None:
            if not text and not more and logprobs == b"null":
                return None
            end = b',"finish_reason":null'
        else:
            end = b',"finish_reason":%b,"stop_reason":%b' % (
                json_line(output.finish_reason),
                json_line(output.stop_reason),
            )
        return b"".join((state.prefix, json_line(text), b',"logprobs":', logprobs, end, more, b"}"))


class CompletionService:
    """Checks completion requests and makes jobs of them."""

    def __init__(self, builder: RequestBuilder) -> None:
        self._builder = builder
        self._model = builder.model

    async def prepare(self, body: CompletionRequest) -> CompletionJob:
        """Return the job for `body`; all that can be wrong with it is found here.

        Raises ModelNotFoundError, InvalidRequestError and ContextLengthError.
        """
        head = AnswerHead(self._builder.check(body, "logprobs", body.logprobs), "cmpl")
        return await self._model.text_work(self._prepare, body, head)

    def _prepare(self, body: CompletionRequest, head: AnswerHead) -> CompletionJob:
        explicit = body.max_tokens if "max_tokens" in body.model_fields_set else None
        wanted = WantedTokens(explicit, DEFAULT_MAX_TOKENS, "prompt")
        route = RouteParams(
            best_of=body.best_of,
            logprobs=_num_logprobs(body),
            prompt_logprobs=_num_prompt_logprobs(body),
            bad_words_token_ids=self._builder.encoder.encode_bad_words(body.bad_words or ()),
        )
        made = {}
        for number in longest_first(body.prompt):
            prompt = self._prompt(body.prompt[number], body, wanted)
            request_id = f"{head.id}-{number}"
            made[number] = (
                prompt,
                self._builder.build(request_id, prompt.token_ids, body, wanted, route),
            )
        prompts, requests = zip(*(made[number] for number in range(len(made))), strict=True)
        style, tokenizer = self._style(body), self._model.tokenizer
        return CompletionJob(body, head, list(prompts), list(requests), style, tokenizer)

    def _prompt(
        self, prompt: str | list[int], body: CompletionRequest, wanted: WantedTokens
    ) -> CompletionPrompt:
        tokenizer = self._model.tokenizer
        if isinstance(prompt, str):
            token_ids = self._encode(prompt, body.add_special_tokens, _is_truncated(body))
        else:
            token_ids = prompt
            if min(token_ids) < 0 or max(token_ids) >= self._model.vocab_size:
                raise InvalidRequestError(
                    f"`prompt` must hold token ids from 0 to {self._model.vocab_size - 1}", "prompt"
                )
        kept = self._builder.truncate(token_ids, body, wanted)
        echo_text = ""
        if body.echo:
            if isinstance(prompt, str) and len(kept) == len(token_ids):
                echo_text = prompt
            else:
                echo_text = tokenizer.decode(
                    kept, body.skip_special_tokens, body.spaces_between_special_tokens
                )
        return CompletionPrompt(tuple(kept), echo_text)

    def encode_text(
        self, text: str, add_special_tokens: bool, truncated: bool = False
    ) -> list[int]:
        """Tokenize; slow, so not for the event loop. Raises ContextLengthError."""
        return self._builder.encoder.encode(text, add_special_tokens, "prompt", truncated)

    def _encode(self, text: str, add_special_tokens: bool, truncated: bool) -> list[int]:
        token_ids = self.encode_text(text, add_special_tokens, truncated) if text else []
        if token_ids:
            return token_ids
        bos_token_id = self._model.tokenizer.bos_token_id
        if bos_token_id is None:
            raise InvalidRequestError(
                "`prompt` is empty and the model has no BOS token to start from", "prompt"
            )
        return [bos_token_id]

    def _style(self, body: CompletionRequest) -> LogprobStyle | None:
        if body.logprobs is None:
            return None
        special_ids = self._model.tokenizer.special_ids
        hidden_ids = special_ids if body.skip_special_tokens else frozenset[int]()
        return self._builder.logprob_style(body, body.logprobs, hidden_ids)


def _num_logprobs(body: CompletionRequest) -> int | None:
    # Draws are ranked by their logprobs; beams come ranked from the engine.
    ranked = body.best_of is not None and body.best_of > body.n and not body.use_beam_search
    return 0 if ranked and body.logprobs is None else body.logprobs


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((number for number in wanted if number is not None), default=None)


def _is_truncated(body: CompletionRequest) -> bool:
    if body.truncate_prompt_tokens is None:
        return False
    return sum(map(len, body.prompt)) <= MAX_TRUNCATED_CHARS


def _best(choices: list[CollectedChoice], n: int) -> list[CollectedChoice]:
    if len(choices) == n:
        return choices
    return sorted(choices, key=CollectedChoice.mean_logprob, reverse=True)[:n]


def _first_token(token_id: int, tokenizer: Tokenizer) -> TokenRecord:
    return TokenRecord(
        token_id=token_id,
        text=tokenizer.token_text(token_id),
        token_bytes=tokenizer.token_bytes(token_id),
        logprob=0.0,
        rank=0,
        top=(),
    )
