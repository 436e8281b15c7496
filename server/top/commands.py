"""The command `octavo top`."""

import time

import click
import httpx
from rich.console import Console
from rich.live import Live

from octavo.server.top.samples import parse
from octavo.server.top.view import View

_TIMEOUT_S = 5.0


@click.command()
@click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the server."
)
@click.option("--api-key", envvar="OCTAVO_API_KEY", help="Key that the server asks for.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option(
    "--count", type=click.IntRange(min=1), help="End after so many looks. [default: never]"
)
def top(url: str, api_key: str | None, interval: float, count: int | None) -> None:
    """Watch a running server: rates, queue, cache and latencies of the last minute."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    view = View()
    looks = 0
    console = Console()
    with (
        httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S) as client,
        Live(view.render(url), console=console, screen=console.is_terminal) as live,
    ):
        try:
            while True:
                look(client, view)
                live.update(view.render(url), refresh=True)
                looks += 1
                if looks == count:
                    break
                time.sleep(interval)
        except KeyboardInterrupt:
            return
    if not console.is_terminal:
        console.line()


def look(client: httpx.Client, view: View) -> None:
    """Scrape once; what goes wrong is shown and tried again."""
    try:
        answer = client.get("/metrics")
    except httpx.HTTPError as error:
        view.add_failure(f"no answer: {type(error).__name__}")
        return
    if answer.status_code != httpx.codes.OK:
        reason = "the key is missing or wrong" if answer.status_code == 401 else "no metrics"
        view.add_failure(f"HTTP {answer.status_code}: {reason}")
        return
    view.add(parse(answer.text, time.monotonic()))
