"""Reasoning and answer of the choices of a request, with their tokens."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.engine.tokenizer import Tokenizer
from octavo.server.reasoning.formats import Phase, ReasoningFormat
from octavo.server.reasoning.parser import ReasoningParser


class SplitOutput(NamedTuple):
    """What an output adds to either part; its first `num_tokens` tokens are reasoning."""

    reasoning: str
    content: str
    num_tokens: int

    def joined(self, after: "SplitOutput") -> "SplitOutput":
        """Put an echo, which has no tokens of its own, before what the model wrote."""
        return SplitOutput(
            self.reasoning + after.reasoning, self.content + after.content, after.num_tokens
        )


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How the choices of a request begin."""

    form: ReasoningFormat
    phase: Phase
    tokenizer: Tokenizer

    def splitter(self) -> "ReasoningSplitter":
        """Return the state of a new choice."""
        return ReasoningSplitter(self)


class ReasoningSplitter:
    """One choice. `num_tokens` counts what was reasoned so far, the closing tag included."""

    def __init__(self, begin: Reasoning) -> None:
        self.num_tokens = 0
        self._tokenizer = begin.tokenizer
        self._closing = begin.form.closing
        self._parser = ReasoningParser(begin.form, begin.phase)
        self._tail = ""
        self._num_undecided = 0

    @property
    def undecided(self) -> bool:
        """True as long as nothing tells whether the text begins with reasoning."""
        return self._parser.phase is Phase.UNDECIDED

    def push(self, text: str, token_ids: Sequence[int], last: bool) -> SplitOutput:
        """Add the text and the tokens of an output; with `last` nothing is held back."""
        parser = self._parser
        if parser.phase is Phase.ANSWER:
            return SplitOutput(*parser.push(text, last), 0)
        seen, self._tail = self._tail, (self._tail + text)[-len(self._closing) :]
        reasoning, content = parser.push(text, last)
        if parser.phase is Phase.UNDECIDED:
            self._num_undecided += len(token_ids)
            return SplitOutput(reasoning, content, 0)
        num_tokens = 0
        if parser.phase is Phase.REASONING:
            num_tokens = len(token_ids)
        elif parser.closed:
            num_tokens = self._find_end(seen, token_ids)
        if parser.closed or num_tokens:
            self.num_tokens += self._num_undecided + num_tokens
            self._num_undecided = 0
        return SplitOutput(reasoning, content, num_tokens)

    def _find_end(self, seen: str, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens are needed to complete the closing tag after `seen`."""

        def is_complete(num_tokens: int) -> bool:
            text = self._tokenizer.decode(token_ids[:num_tokens], skip_special_tokens=False)
            return self._closing in seen + text

        return bisect.bisect_left(range(len(token_ids)), True, key=is_complete)
