"""The objects that answers of /v1/responses are made of."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.engine.core.request import FinishReason
from octavo.engine.output_processor import ChoiceOutput, TokenRecord
from octavo.server.errors import ErrorAnswer
from octavo.server.logprobs import LogprobStyle, chat_content
from octavo.server.output_stream import CollectedChoice
from octavo.server.reasoning.splitter import Reasoning, ReasoningSplitter
from octavo.server.usage import UsageCounter

JsonDict = dict[str, Any]


class NewText(NamedTuple):
    """What an output adds; `records` are those of the message's tokens."""

    reasoning: str
    content: str
    records: Sequence[TokenRecord]


class Answer:
    """What was generated so far, reasoning and message apart."""

    def __init__(self, reasoning: Reasoning | None, usage: UsageCounter) -> None:
        self.finish_reason: FinishReason | None = None
        self.records: list[TokenRecord] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._undecided: tuple[TokenRecord, ...] = ()
        self._splitter = None if reasoning is None else reasoning.splitter()
        self._usage = usage

    @property
    def reasoning(self) -> str:
        """The text of the reasoning."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """The text of the message."""
        return "".join(self._content)

    @property
    def status(self) -> str:
        """The status of the response and of its last item."""
        return "incomplete" if self.finish_reason is FinishReason.LENGTH else "completed"

    def add(self, output: ChoiceOutput | CollectedChoice) -> NewText:
        """Append what is new, and return it."""
        self.finish_reason = output.finish_reason
        new = NewText("", output.text, output.logprobs)
        if self._splitter is not None:
            new = self._split(self._splitter, output)
        self._reasoning.append(new.reasoning)
        self._content.append(new.content)
        self.records.extend(new.records)
        return new

    def _split(
        self, splitter: ReasoningSplitter, output: ChoiceOutput | CollectedChoice
    ) -> NewText:
        last = output.finish_reason is not None
        split = splitter.push(output.text, output.token_ids, last)
        self._usage.set_reasoning(0, splitter.num_tokens)
        records = (*self._undecided, *output.logprobs)
        if splitter.undecided:
            self._undecided = records
            return NewText("", "", ())
        num_reasoning = split.num_tokens
        if splitter.num_tokens:
            num_reasoning += len(self._undecided)
        self._undecided = ()
        return NewText(split.reasoning, split.content, records[num_reasoning:])


@dataclass(frozen=True, slots=True)
class ResponseObjects:
    """Makes the objects of one response; `fixed` is what is the same in all of them."""

    fixed: JsonDict
    style: LogprobStyle
    usage: UsageCounter
    message_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    reasoning_id: str = field(default_factory=lambda: f"rs_{uuid.uuid4().hex}")

    def response(self, status: str, output: list[JsonDict], **fields: Any) -> JsonDict:  # noqa: ANN401 - JSON
        """Return the response object; without `fields` nothing has ended yet."""
        open_ends = {"error": None, "incomplete_details": None, "usage": None}
        return {**self.fixed, "status": status, "output": output, **open_ends, **fields}

    def ended(self, answer: Answer) -> JsonDict:
        """Return the response object of an answer that has come to its end."""
        status = answer.status
        cut = status == "incomplete"
        return self.response(
            status,
            self.items(answer, status),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage=self._usage(),
        )

    def failed(self, error: ErrorAnswer, answer: Answer) -> JsonDict:
        """Return the response object of an answer that broke off."""
        return self.response(
            "failed",
            self.items(answer, "incomplete"),
            error={"code": error.type, "message": error.message},
        )

    def items(self, answer: Answer, status: str) -> list[JsonDict]:
        """Return the output; `status` is that of its last item."""
        items = []
        if answer.reasoning:
            ended = "completed" if answer.content else status
            items.append(self.reasoning_item(ended, [self.reasoning_part(answer.reasoning)]))
        if answer.content or not answer.reasoning:
            part = self.message_part(answer.content, answer.records)
            items.append(self.message_item(status, [part]))
        return items

    def message_item(self, status: str, content: list[JsonDict]) -> JsonDict:
        """Return the output item of the text."""
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def reasoning_item(self, status: str, content: list[JsonDict]) -> JsonDict:
        """Return the output item of the reasoning."""
        return {
            "id": self.reasoning_id,
            "type": "reasoning",
            "summary": [],
            "status": status,
            "content": content,
        }

    def message_part(self, text: str, records: Sequence[TokenRecord]) -> JsonDict:
        """Return the one part of the message."""
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.logprobs(records),
        }

    def reasoning_part(self, text: str) -> JsonDict:
        """Return the one part of the reasoning."""
        return {"type": "reasoning_text", "text": text}

    def logprobs(self, records: Sequence[TokenRecord]) -> list[JsonDict]:
        """Return the entries of some tokens; none if not asked for."""
        return chat_content(records, self.style)

    def _usage(self) -> JsonDict:
        usage = self.usage.as_dict()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
