"""A conversation at the terminal."""

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from octavo.server.terminal.client import Client, ClientError, Pieces
from octavo.server.terminal.screen import Screen

_HELP = """\
/system TEXT   set the system message (empty: none) and begin anew
/clear         forget the conversation, keep the system message
/exit          end, as Ctrl-D does
Ctrl-C         stop the answer"""


@dataclass(frozen=True, slots=True)
class Shown:
    """The text of an answer, and whether it came to its end or was stopped by Ctrl-C."""

    text: str
    complete: bool


def show(screen: Screen, pieces: Pieces) -> Shown:
    """Show an answer as it arrives.

    Raises:
        ClientError: there is no answer, or it broke off.
    """
    said: list[str] = []
    cut = False
    try:
        with closing(pieces):
            for piece in pieces:
                said.append(piece.text)
                screen.reasoning(piece.reasoning)
                screen.answer(piece.text)
                cut = cut or piece.finish_reason == "length"
    except KeyboardInterrupt:
        return Shown("".join(said), complete=False)
    finally:
        screen.end_answer()
    if cut:
        screen.note("(cut at the limit of tokens)")
    return Shown("".join(said), complete=True)


class ChatSession:
    """The messages so far, and what is done with the next line."""

    def __init__(
        self, client: Client, screen: Screen, fields: Mapping[str, Any], system: str | None = None
    ) -> None:
        self._client = client
        self._screen = screen
        self._fields = fields
        self._system = system
        self._history: list[dict[str, str]] = []

    def ask(self, text: str) -> bool:
        """Send a message and show the answer; both become part of the conversation.

        An answer that Ctrl-C stopped stays as far as it came; False says that it was stopped.

        Raises:
            ClientError: there is no answer; the conversation is as before.
        """
        message = {"role": "user", "content": text}
        shown = show(self._screen, self._client.chat(self._messages(message), self._fields))
        if shown.text:
            self._history += [message, {"role": "assistant", "content": shown.text}]
        return shown.complete

    def _messages(self, message: dict[str, str]) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._history, message]

    def converse(self, lines: Iterable[str]) -> None:
        """Take lines, commands and messages, until there are no more or one is `/exit`."""
        for line in lines:
            if line.startswith("/"):
                if not self._command(line):
                    return
                continue
            try:
                if not self.ask(line):
                    self._screen.note("(stopped)")
            except ClientError as error:
                self._screen.error(str(error))

    def _command(self, line: str) -> bool:
        """Do what a line that begins with `/` says; False ends the conversation."""
        name, _, argument = line.strip().partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/clear":
                self._history.clear()
                self._screen.note("(conversation forgotten)")
            case "/system":
                self._system = argument.strip() or None
                self._history.clear()
                self._screen.note("(system message set)" if self._system else "(no system message)")
            case "/help" | "/?":
                self._screen.note(_HELP)
            case _:
                self._screen.error(f"{name} is no command; /help lists them")
        return True
