"""The events of a stream of /v1/responses."""

from collections.abc import Sequence
from typing import Any

from octavo.engine.output_processor import ChoiceOutput, TokenRecord
from octavo.server.errors import ErrorAnswer
from octavo.server.response_objects import Answer, JsonDict, ResponseObjects
from octavo.server.streaming import json_line

_MESSAGE, _REASONING = "output_text", "reasoning_text"
"""Kinds of text as the events name them."""


class ResponseEventWriter:
    """Renders the events; each carries its type twice and a number."""

    def __init__(self, objects: ResponseObjects, answer: Answer) -> None:
        self._objects = objects
        self._answer = answer
        self._num_events = 0
        self._num_items = 0
        self._open: str | None = None  # the kind of text that comes at present

    def write(self, number: int, outputs: list[ChoiceOutput]) -> bytes:
        """Return the events for new outputs."""
        events: list[bytes] = []
        for output in outputs:
            self._objects.usage.add(number, output)
            if self._num_events == 0:
                begun = self._objects.response("in_progress", [])
                events.append(self._event("response.created", response=begun))
                events.append(self._event("response.in_progress", response=begun))
            new = self._answer.add(output)
            if new.reasoning:
                events += self._begin(_REASONING)
                events.append(self._text_event("delta", delta=new.reasoning))
            if new.content or new.records:
                events += self._begin(_MESSAGE)
                events.append(self._message_delta(new.content, new.records))
        return b"".join(events)

    def last(self) -> bytes:
        """Return the events that end the stream."""
        status = self._answer.status
        events = self._begin(_MESSAGE) if self._open is None else []
        events += self._end(status)
        ended = self._objects.ended(self._answer)
        return b"".join((*events, self._event(f"response.{status}", response=ended)))

    def failed(self, error: ErrorAnswer) -> bytes:
        """Return the event of a stream that breaks off."""
        response = self._objects.failed(error, self._answer)
        return self._event("response.failed", response=response)

    def _message_delta(self, text: str, records: Sequence[TokenRecord]) -> bytes:
        return self._text_event("delta", delta=text, logprobs=self._objects.logprobs(records))

    def _begin(self, kind: str) -> list[bytes]:
        """Open the item of this kind of text, unless it is open."""
        if self._open == kind:
            return []
        events = [] if self._open is None else self._end("completed")
        self._open = kind
        index = self._num_items
        self._num_items += 1
        item, part = self._item("in_progress", []), self._part("", ())
        return [
            *events,
            self._event("response.output_item.added", output_index=index, item=item),
            self._event("response.content_part.added", **self._place(), part=part),
        ]

    def _end(self, status: str) -> list[bytes]:
        """Close the item that is open."""
        answer, logprobs = self._answer, {}
        text = answer.reasoning if self._open == _REASONING else answer.content
        part = self._part(text, answer.records)
        if self._open == _MESSAGE:
            logprobs = {"logprobs": part["logprobs"]}
        item, index = self._item(status, [part]), self._num_items - 1
        return [
            self._text_event("done", text=text, **logprobs),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _item(self, status: str, content: list[JsonDict]) -> JsonDict:
        if self._open == _REASONING:
            return self._objects.reasoning_item(status, content)
        return self._objects.message_item(status, content)

    def _part(self, text: str, records: Sequence[TokenRecord]) -> JsonDict:
        if self._open == _REASONING:
            return self._objects.reasoning_part(text)
        return self._objects.message_part(text, records)

    def _place(self) -> JsonDict:
        objects = self._objects
        item_id = objects.reasoning_id if self._open == _REASONING else objects.message_id
        return {"item_id": item_id, "output_index": self._num_items - 1, "content_index": 0}

    def _text_event(self, what: str, **fields: Any) -> bytes:  # noqa: ANN401 - JSON
        return self._event(f"response.{self._open}.{what}", **self._place(), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - JSON
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_line(data))
