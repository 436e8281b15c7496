"""The command `octavo blocks`."""

import time

import click
import httpx
from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from octavo.server.blocks.view import Canvas, render
from octavo.server.protocol.blocks import BlocksAnswer

PATH = "/debug/blocks"
INTERVAL_S = 1.0
_TIMEOUT_S = 10.0
# Lines around the map: head, gap, legend, two of figures, note on cells, end.
_OTHER_LINES = 8
_REASONS = {
    401: "the admin key is missing or wrong",
    404: "the server was started without --enable-admin",
}


class LookError(Exception):
    """The pool cannot be seen; the message is for the person at the terminal."""


@click.command()
@click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the server."
)
@click.option("--admin-key", envvar="OCTAVO_ADMIN_KEY", help="The server's --admin-key.")
@click.option("--once", is_flag=True, help="Print one map and exit.")
def blocks(url: str, admin_key: str | None, once: bool) -> None:
    """Draw the block pool of a running server as a map, anew each second.

    Colours tell what a block is held for, the height of a bar how full it is, and a number how many
    share it. The server needs --enable-admin.
    """
    headers = {} if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
    console = Console()
    with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S) as client:
        if once:
            try:
                answer = look(client)
            except LookError as error:
                raise click.ClickException(str(error)) from error
            console.print(render(answer, Canvas(console.width, None)))
        else:
            _watch(client, console, url)


def _watch(client: httpx.Client, console: Console, url: str) -> None:
    with Live(_screen(url, Text()), console=console, screen=console.is_terminal) as live:
        try:
            while True:
                live.update(_screen(url, _draw(client, console)), refresh=True)
                time.sleep(INTERVAL_S)
        except KeyboardInterrupt:
            return


def _screen(url: str, body: RenderableType) -> Group:
    head = Text.assemble(("octavo blocks", "bold"), f"  {url}")
    return Group(head, body, Text("Ctrl-C ends", style="dim"))


def _draw(client: httpx.Client, console: Console) -> RenderableType:
    try:
        answer = look(client)
    except LookError as error:
        return Text(str(error), style="red")
    return render(answer, Canvas(console.width, console.height - _OTHER_LINES))


def look(client: httpx.Client) -> BlocksAnswer:
    """Ask the server for its pool. Raises LookError."""
    try:
        answer = client.get(PATH)
    except httpx.HTTPError as error:
        raise LookError(f"no answer: {type(error).__name__}") from error
    if answer.status_code != httpx.codes.OK:
        reason = _REASONS.get(answer.status_code, "no map now")
        raise LookError(f"HTTP {answer.status_code}: {reason}")
    try:
        return BlocksAnswer.model_validate_json(answer.content)
    except ValidationError as error:
        raise LookError("the answer is no map of blocks; is this an Octavo server?") from error
