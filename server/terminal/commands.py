"""The commands `octavo chat` and `octavo complete`."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import click

from octavo.server.terminal.chat import ChatSession, show
from octavo.server.terminal.client import Client, ClientError
from octavo.server.terminal.screen import Screen

_POLL = 0.5  # seconds between questions to a server that is starting
_DEFAULT_MAX_TOKENS = 128
_INTERRUPTED = 130  # exit status of a program that Ctrl-C ended


class ClientOptions(TypedDict):
    """Parsed options that both commands have."""

    url: str
    model: str | None
    api_key: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None


class ChatOptions(ClientOptions):
    """Parsed options of `octavo chat`."""

    message: str | None
    system: str | None


class CompleteOptions(ClientOptions):
    """Parsed options of `octavo complete`."""

    prompt: str | None


_OPTIONS: Sequence[Callable[[Callable[..., Any]], Callable[..., Any]]] = [
    click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the server."
    ),
    click.option("--model", help="Model to ask; the server's first one if not given."),
    click.option("--api-key", envvar="OCTAVO_API_KEY", help="Key that the server asks for."),
    click.option("--temperature", type=float, help="0 is greedy. [default: the server's]"),
    click.option("--top-p", type=float, help="Share of the likeliest tokens that is kept."),
    click.option("--seed", type=int, help="Makes an answer repeatable."),
]


def _client_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("message", required=False)
@_client_options
@click.option("--max-tokens", type=int, help="Longest answer. [default: up to the context's end]")
@click.option("--system", help="System message of the conversation.")
def chat(**options: Unpack[ChatOptions]) -> None:
    """Talk with the model of a running server.

    With MESSAGE, or with text on standard input, one answer is given. At a terminal a
    conversation begins; /help lists its commands.
    """
    screen = Screen()
    question = _given_text(options["message"])
    try:
        with Client(options["url"], options["api_key"]) as client:
            fields = _fields(client, screen, options)
            session = ChatSession(client, screen, fields, options["system"])
            if question is not None:
                sys.exit(0 if session.ask(question) else _INTERRUPTED)
            screen.note(f"{fields['model']} at {client.url}; /help lists commands")
            session.converse(screen.lines())
    except ClientError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@click.argument("prompt", required=False)
@_client_options
@click.option(
    "--max-tokens",
    type=int,
    default=_DEFAULT_MAX_TOKENS,
    show_default=True,
    help="Longest continuation.",
)
def complete(**options: Unpack[CompleteOptions]) -> None:
    """Let the model of a running server continue a text.

    The text is PROMPT, or what is on standard input. At a terminal each typed line is continued
    on its own.
    """
    screen = Screen()
    prompt = _given_text(options["prompt"])
    try:
        with Client(options["url"], options["api_key"]) as client:
            fields = _fields(client, screen, options)
            if prompt is not None:
                shown = show(screen, client.complete(prompt, fields))
                sys.exit(0 if shown.complete else _INTERRUPTED)
            screen.note(f"{fields['model']} at {client.url}; type the beginning of a text")
            for line in screen.lines():
                try:
                    show(screen, client.complete(line, fields))
                except ClientError as error:
                    screen.error(str(error))
    except ClientError as error:
        raise click.ClickException(str(error)) from error


def _given_text(argument: str | None) -> str | None:
    """The argument, else standard input; None at a terminal, where lines are typed."""
    if argument is not None:
        return argument
    if sys.stdin.isatty():
        return None
    text = sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n")
    if not text.strip():
        raise click.UsageError("there is nothing to send: standard input is empty")
    return text


def _fields(client: Client, screen: Screen, options: ClientOptions) -> dict[str, Any]:
    """The fields that all requests share: the model and the sampling options that were given."""
    models = client.models()
    if models is None:
        with screen.waiting(f"the server at {client.url} is starting; Ctrl-C gives up"):
            while (models := client.models()) is None:
                time.sleep(_POLL)
    model = options["model"] or next(iter(models), None)
    if model is None:
        raise ClientError(f"the server at {client.url} serves no model")
    sampling = {
        "max_tokens": options["max_tokens"],
        "temperature": options["temperature"],
        "top_p": options["top_p"],
        "seed": options["seed"],
    }
    return {"model": model} | {name: value for name, value in sampling.items() if value is not None}
