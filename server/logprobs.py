"""Log-probabilities as the two routes write them.

Values are finite in JSON: minus infinity is sent as `LOWEST`.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.engine.output_processor import TokenAlternative, TokenRecord

LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class LogprobStyle:
    """How tokens are written.

    `num_top` is the number of alternatives asked for. `as_token_ids` writes a token as
    `token_id:N`. The text leaves out the tokens of `hidden_ids`, unless they stand in a prompt
    that is echoed as the client wrote it.
    """

    num_top: int
    as_token_ids: bool
    hidden_ids: frozenset[int]

    def name(self, token: TokenRecord | TokenAlternative) -> str:
        """What stands for a token."""
        return f"token_id:{token.token_id}" if self.as_token_ids else token.text


def finite(logprob: float) -> float:
    """Return a value that JSON can hold."""
    return max(logprob, LOWEST)


def _chat_entry(token: TokenRecord | TokenAlternative, style: LogprobStyle) -> dict[str, Any]:
    raw = token.token_bytes
    return {
        "token": style.name(token),
        "logprob": finite(token.logprob),
        "bytes": None if raw is None else list(raw),
    }


def chat_content(records: Iterable[TokenRecord], style: LogprobStyle) -> list[dict[str, Any]]:
    """Return the entries of `logprobs.content` of a chat choice."""
    return [
        {
            **_chat_entry(record, style),
            "top_logprobs": [_chat_entry(token, style) for token in record.top[: style.num_top]],
        }
        for record in records
    ]


def _top_map(record: TokenRecord, style: LogprobStyle) -> dict[str, float]:
    """Return the best candidates and the chosen token, best first, by text."""
    candidates: list[TokenRecord | TokenAlternative] = list(record.top[: style.num_top])
    if all(token.token_id != record.token_id for token in candidates):
        candidates.append(record)
    result: dict[str, float] = {}
    for token in candidates:
        name = style.name(token)
        # Several ids may have one text, such as bytes that are no character alone.
        key = f"token_id:{token.token_id}" if name in result else name
        result[key] = finite(token.logprob)
    return result


@dataclass(slots=True)
class CompletionLogprobs:
    """The lists of one completion choice; they grow token by token and are taken in pieces.

    `text_offset` counts the characters of whole tokens' bytes, so a character that is split over
    tokens counts once, with its last byte.
    """

    style: LogprobStyle
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    _num_chars: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def add_prompt(self, first: TokenRecord, records: Iterable[TokenRecord], text: str) -> None:
        """Add the tokens of an echoed prompt, whose text is `text`.

        Nothing predicts the first token: its values are null.
        """
        prompt = (first, *records)
        lead_dropped = self._lead_dropped(prompt, text)
        for place, record in enumerate(prompt):
            if lead_dropped and self._num_chars == 0 and record.text.startswith(" "):
                lead_dropped = False
                bare = record.text[1:]
                record = replace(record, text=bare, token_bytes=bare.encode())
            # A control token that the tokenizer added stands in no text; one that the client
            # wrote does.
            written = text.startswith(record.text, self._num_chars)
            self._add_token(record, hidden=record.token_id in self.style.hidden_ids and not written)
            self.token_logprobs.append(finite(record.logprob) if place else None)
            self.top_logprobs.append(_top_map(record, self.style) if place else None)

    def add(self, records: Sequence[TokenRecord]) -> None:
        """Add generated tokens."""
        for record in records:
            self._add_token(record, hidden=record.token_id in self.style.hidden_ids)
            self.token_logprobs.append(finite(record.logprob))
            self.top_logprobs.append(_top_map(record, self.style))

    def take(self) -> dict[str, Any]:
        """Return the lists and begin new ones; offsets go on."""
        result = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs = [], []
        self.top_logprobs, self.text_offset = [], []
        return result

    def _lead_dropped(self, records: Sequence[TokenRecord], text: str) -> bool:
        """True when the tokens begin with a space that the text has not.

        Many tokenizers put one before a text and take it away when they decode.
        """
        if not text.startswith(" "):
            return True
        raw = b"".join(
            record.token_bytes or b""
            for record in records
            if record.token_id not in self.style.hidden_ids
        )
        return raw == b" " + text.encode()

    def _add_token(self, token: TokenRecord, hidden: bool) -> None:
        name = self.style.name(token)
        self.tokens.append("" if hidden and not self.style.as_token_ids else name)
        self.text_offset.append(self._num_chars)
        if hidden:
            return
        if token.token_bytes is None:
            self._num_chars += len(token.text)
        else:
            self._num_chars += len(self._decoder.decode(token.token_bytes))


def prompt_logprobs(
    records: Iterable[TokenRecord], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Return the `prompt_logprobs` list: null for the first token, then one map per token."""
    return [None, *(_prompt_entry(record, num_top) for record in records)]


def _prompt_entry(record: TokenRecord, num_top: int) -> dict[str, dict[str, Any]]:
    entry = {
        str(token.token_id): _ranked(token, rank)
        for rank, token in enumerate(record.top[:num_top], start=1)
    }
    entry.setdefault(str(record.token_id), _ranked(record, record.rank))
    return entry


def _ranked(token: TokenRecord | TokenAlternative, rank: int) -> dict[str, Any]:
    return {"logprob": finite(token.logprob), "rank": rank, "decoded_token": token.text}
