"""What the terminal commands show, and the lines they read."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

from rich.console import Console

with suppress(ImportError):  # some builds of Python lack it
    # Importing it gives `input` line editing and recall of earlier lines.
    import readline  # noqa: F401

_PROMPT = ">>> "
# Control characters other than tab and line feed: an answer must not steer the terminal.
_CONTROLS = {code: None for code in (*range(9), *range(11, 32), *range(127, 160))}


class Screen:
    """Answers go to standard output, everything else to standard error.

    When standard output is no terminal it holds the plain text of the answer and nothing else.
    """

    def __init__(self) -> None:
        self._out = Console()
        self._notes = Console(stderr=True)
        self._line_is_open = False
        self._thinking = False

    def answer(self, text: str) -> None:
        """The next part of an answer, without a line end."""
        if self._thinking and text:
            self._thinking = False
            self._out.out("\n")
        self._write(text)

    def reasoning(self, text: str) -> None:
        """The next part of a model's thinking, on a terminal only."""
        if text and self._out.is_terminal:
            self._thinking = True
            self._write(text, style="dim italic")

    def end_answer(self) -> None:
        """End the line that an answer has begun."""
        if self._line_is_open:
            self._out.out("")
        self._line_is_open = self._thinking = False

    def _write(self, text: str, style: str | None = None) -> None:
        if not text:
            return
        self._line_is_open = True
        if self._out.is_terminal:
            text = text.translate(_CONTROLS)
        self._out.out(text, end="", style=style, highlight=False)

    def note(self, text: str) -> None:
        """A remark of the program."""
        self._notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """A fault that the program goes on after."""
        self._notes.print(
            text.translate(_CONTROLS), style="red", markup=False, highlight=False, soft_wrap=True
        )

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """Show that something is waited for, while the block lasts."""
        if self._notes.is_terminal:
            return self._notes.status(text)
        self.note(text)
        return nullcontext()

    def lines(self, read: Callable[[str], str] = input) -> Iterator[str]:
        """Lines that are typed, without empty ones, until Ctrl-D."""
        while True:
            try:
                line = read(_PROMPT)
            except EOFError:
                self._out.out("")
                return
            except KeyboardInterrupt:
                self._out.out("")
                self.note("Ctrl-D ends the program")
                continue
            if line.strip():
                yield line
