"""From token ids to text piece by piece, and the stop strings.

The pieces of a sequence, put together, are exactly `decode(prompt + generated)` without the prefix
`decode(prompt)`. Text is given out only once no later token can change it.
"""

import codecs
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_CHAR_BYTES = 4
_CONTEXT_TOKENS = 6
"""Visible prompt tokens that a decoder other than the byte-level one sees for context."""


class DetokenizerResult(NamedTuple):
    """What some new tokens add.

    `text` may be given to the client. `stop` is the stop string that ended the text.
    `num_tokens_used` of the tokens count: all, or those up to the one that completed the stop.
    `pieces` holds the text of each used token, before a stop string cut any of it; a character
    split over several tokens belongs to the last of them.
    """

    text: str
    stop: str | None
    num_tokens_used: int
    pieces: tuple[str, ...]


class Detokenizer:
    """Text state of one choice."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._hidden_ids = _hidden_ids(tokenizer, params)
        self._decoder = _make_decoder(tokenizer, prompt_token_ids, params)
        self._stops = _StopStrings(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def append(self, token_ids: Sequence[int], last: bool = False) -> DetokenizerResult:
        """Add tokens; with `last` nothing is held back any longer.

        Nothing may follow a result whose `stop` is set, or a call with `last`.
        """
        texts: list[str] = []
        pieces: list[str] = []
        for token_id in token_ids:
            self._num_tokens += 1
            if token_id in self._hidden_ids:
                pieces.append("")
                continue
            text, piece = self._decoder.push(token_id)
            pieces.append(piece)
            stop = self._release(text, texts) if text else None
            if stop is not None:
                return DetokenizerResult("".join(texts), stop, len(pieces), tuple(pieces))
        stop = self._finish(texts, pieces) if last else None
        return DetokenizerResult("".join(texts), stop, len(pieces), tuple(pieces))

    def _finish(self, texts: list[str], pieces: list[str]) -> str | None:
        text, piece = self._decoder.flush()
        if pieces:
            pieces[-1] += piece
        stop = self._release(text, texts) if text else None
        if stop is None:
            texts.append(self._stops.flush())
        return stop

    def _release(self, text: str, texts: list[str]) -> str | None:
        # The first min_tokens tokens cannot complete a stop string.
        released, stop = self._stops.push(text, search=self._num_tokens > self._min_tokens)
        texts.append(released)
        return stop


class _Decoder(Protocol):
    """Gives (text that is certain now, text of this token) for each visible token."""

    def push(self, token_id: int) -> tuple[str, str]:
        """Add one token."""

    def flush(self) -> tuple[str, str]:
        """Give what is still held."""


def _make_decoder(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
) -> _Decoder:
    hidden = _hidden_ids(tokenizer, params)
    if tokenizer.is_byte_level:
        return _ByteLevelDecoder(tokenizer, prompt_token_ids, hidden)
    spaces = params.spaces_between_special_tokens
    return _WindowDecoder(tokenizer, prompt_token_ids, hidden, spaces)


def _hidden_ids(tokenizer: Tokenizer, params: SamplingParams) -> frozenset[int]:
    return tokenizer.special_ids if params.skip_special_tokens else frozenset()


class _ByteLevelDecoder:
    """The text is the UTF-8 decoding of all tokens' bytes, so a few pending bytes are all state."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], hidden_ids: frozenset[int]
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= _MAX_CHAR_BYTES:
                break
            if token_id not in hidden_ids:
                tail = (tokenizer.token_bytes(token_id) or b"") + tail
        utf8.decode(tail)
        self._decode = utf8.decode
        # The prompt's own text shows U+FFFD for the character that it ends in the middle of.
        self._prompt_end = utf8.getstate()[0].decode(errors="replace")

    def push(self, token_id: int) -> tuple[str, str]:
        text = self._decode(self._token_bytes(token_id) or b"")
        if self._prompt_end and text:
            text = self._without_prompt_end(text)
        return text, text

    def flush(self) -> tuple[str, str]:
        text = self._without_prompt_end(self._decode(b"", True))
        return text, text

    def _without_prompt_end(self, text: str) -> str:
        end, self._prompt_end = self._prompt_end, ""
        return _without_shared_start(text, end)


class _WindowDecoder:
    """Decodes a few tokens with and without the new ones; the difference is their text.

    Holds for every decoder whose text depends on near neighbours only. A run of byte-fallback
    tokens is decoded as a whole (one wrong byte turns all of them into U+FFFD), so its text waits
    for the end of the run. The window never begins inside a run.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        hidden_ids: frozenset[int],
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._spaces = spaces_between_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run_text = ""
        window: list[int] = []
        for token_id in reversed(prompt_token_ids):
            in_run = window and tokenizer.fallback_byte(window[-1]) is not None
            if len(window) >= _CONTEXT_TOKENS and not in_run:
                break
            if token_id not in hidden_ids and tokenizer.token_piece(token_id):
                window.append(token_id)
        run = list(takewhile(lambda byte: byte is not None, map(tokenizer.fallback_byte, window)))
        self._utf8.decode(bytes(byte for byte in reversed(run) if byte is not None))
        self._ids = window[::-1]
        self._num_read = len(self._ids)
        self._text = self._decode(self._ids)

    def push(self, token_id: int) -> tuple[str, str]:
        piece = self._tokenizer.token_piece(token_id)
        if not piece:
            return "", ""
        self._ids.append(token_id)
        byte = self._tokenizer.fallback_byte(token_id)
        if byte is not None:
            char = self._utf8.decode(bytes([byte]))
            self._run_text += char
            return "", char
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT):
            return "", ""
        return self._give_out(text)

    def flush(self) -> tuple[str, str]:
        return self._give_out(self._decode(self._ids))

    def _give_out(self, text: str) -> tuple[str, str]:
        new = _without_shared_start(text, self._text)
        piece = new.removeprefix(self._run_text)
        self._run_text = ""
        self._utf8.reset()
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        self._text = self._decode(self._ids)
        return new, piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, spaces_between_special_tokens=self._spaces
        )


def _without_shared_start(text: str, known: str) -> str:
    """`text` without what it has in common with the start of `known`; mostly all of `known`."""
    if text.startswith(known):
        return text[len(known) :]
    pairs = zip(text, known, strict=False)
    return text[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]


class _StopStrings:
    """Finds the earliest stop string and holds back text that may begin one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""

    def push(self, text: str, search: bool) -> tuple[str, str | None]:
        """Return the text that is free now and the stop string that ends it, if one does.

        With `search` a match counts that ends within `text`.
        """
        if not self._held and self._first_chars.isdisjoint(text):
            return text, None
        num_old = len(self._held)
        text = self._held + text
        found = self._find(text, num_old) if search else None
        if found is not None:
            start, stop = found
            return text[: start + len(stop)] if self._include else text[:start], stop
        cut = self._first_possible_start(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Return what is held."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            place = text.find(stop, max(0, num_old - len(stop) + 1))
            if place >= 0 and (best is None or (place, len(stop)) < best[:2]):
                best = (place, len(stop), stop)
        return None if best is None else (best[0], best[2])

    def _first_possible_start(self, text: str) -> int:
        """Where the first tail of `text` begins that may grow into a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] not in self._first_chars:
                continue
            tail = text[start:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
