"""Splitting a text that comes piece by piece into reasoning and answer."""

from typing import NamedTuple

from octavo.server.reasoning.formats import Phase, ReasoningFormat


class SplitText(NamedTuple):
    """What a piece of text adds to either part."""

    reasoning: str
    content: str


class ReasoningParser:
    """The state of one text.

    Tags and the white space around them are left out of both parts; apart from these no text is
    lost. Text that may begin a tag is held back.
    """

    def __init__(self, form: ReasoningFormat, phase: Phase) -> None:
        self._form = form
        self.phase = phase
        self.closed = False  # the closing tag has come
        self._held = ""
        self._at_start = phase is not Phase.ANSWER

    def push(self, text: str, last: bool = False) -> SplitText:
        """Add text; with `last` nothing is held back any longer."""
        if self.phase is Phase.ANSWER and not self._at_start:
            return SplitText("", text)
        text, self._held = self._held + text, ""
        reasoning = ""
        if self.phase is Phase.UNDECIDED:
            text = self._decide(text, last)
        if self.phase is Phase.REASONING:
            reasoning, text = self._split(text, last)
        if self.phase is Phase.ANSWER:
            return SplitText(reasoning, self._answer(text))
        self._held = text
        return SplitText(reasoning, "")

    def _decide(self, text: str, last: bool) -> str:
        start = text.lstrip()
        if start.startswith(self._form.opening):
            self.phase = Phase.REASONING
        elif last or not self._form.opening.startswith(start):
            self.phase, self._at_start = Phase.ANSWER, False
        return text

    def _split(self, text: str, last: bool) -> tuple[str, str]:
        """Return the reasoning that is certain, and what follows it."""
        form = self._form
        if self._at_start:
            # Some models open it again after a prompt that has done so.
            text = text.lstrip().removeprefix(form.opening).lstrip()
            if form.opening.startswith(text) and not last:
                return "", text
            self._at_start = False
        reasoning, tag, rest = text.partition(form.closing)
        if tag:
            self.phase, self._at_start, self.closed = Phase.ANSWER, True, True
            return reasoning.rstrip(), rest
        if last:
            return text, ""
        certain = text[: len(text) - _overlap(text, form.closing)].rstrip()
        return certain, text[len(certain) :]

    def _answer(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        return text


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` begin the tag."""
    sizes = range(min(len(text), len(tag) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)
