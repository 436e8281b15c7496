"""Command line of the resilience scenarios: `octavo bench resilience`."""

import asyncio
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import click

from octavo.loadtest.client import ServerError
from octavo.loadtest.output import OutputFile, write_json
from octavo.loadtest.resilience import connections as many
from octavo.loadtest.resilience import fuzz as damaged
from octavo.loadtest.resilience import overload as beyond
from octavo.loadtest.resilience import soak as long
from octavo.loadtest.resilience import stop
from octavo.loadtest.resilience.outcome import Outcome
from octavo.loadtest.resilience.process import ServerProcess, running

_Scenario = Callable[[ServerProcess], Awaitable[Outcome]]
_serve_args = click.argument("serve_args", nargs=-1, metavar="[MODEL] [-- SERVE FLAGS]")
_json = click.option("--json", "file", type=OutputFile(), help="Write the result there too.")


@click.group()
def resilience() -> None:
    """Start a server and see whether it survives; exits with 1 where a demand is not met."""


def _run(
    scenario: _Scenario,
    serve_args: Sequence[str],
    file: Path | None,
    keep_socket: bool = False,
) -> None:
    # Each connection is a file here and one in the server, which inherits the limit.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # So that the server ends too when this command is told to.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    async def work() -> tuple[Outcome, Path]:
        async with running(serve_args, keep_socket) as server:
            return await scenario(server), server.log

    try:
        outcome, log = asyncio.run(work())
    except ServerError as error:
        raise click.ClickException(str(error)) from error
    click.echo(outcome.render())
    write_json(file, outcome.to_json())
    if outcome.failed:
        click.echo(f"the server's log is {log}", err=True)
        sys.exit(1)
    log.unlink()


@resilience.command()
@click.option("--seconds", default=120.0, show_default=True, help="Length of the overload.")
@click.option("--calibrate", default=30.0, show_default=True, help="Seconds to find the peak.")
@click.option("--factor", default=5.0, show_default=True, help="Times the peak that is sent.")
@_json
@_serve_args
def overload(
    seconds: float, calibrate: float, factor: float, file: Path | None, serve_args: tuple[str, ...]
) -> None:
    """Send several times what the server can do."""
    size = beyond.OverloadSize(calibrate_s=calibrate, seconds=seconds, factor=factor)
    _run(lambda server: beyond.overload(server, size), (*beyond.SERVE_ARGS, *serve_args), file)


@resilience.command()
@click.option("--minutes", default=20.0, show_default=True, help="Length, with the warm-up.")
@_json
@_serve_args
def soak(minutes: float, file: Path | None, serve_args: tuple[str, ...]) -> None:
    """Mixed traffic; three of ten clients misbehave."""
    size = long.SoakSize(seconds=60 * minutes)
    _run(lambda server: long.soak(server, size), (*long.SERVE_ARGS, *serve_args), file)


@resilience.command()
@click.option("--idle", default=2000, show_default=True, help="Idle connections.")
@click.option("--streams", default=500, show_default=True, help="Streams at once.")
@click.option("--reuse", default=10_000, show_default=True, help="Requests over kept connections.")
@_json
@_serve_args
def connections(
    idle: int, streams: int, reuse: int, file: Path | None, serve_args: tuple[str, ...]
) -> None:
    """Many connections, slow readers, kept connections."""
    size = many.ConnectionsSize(idle=idle, streams=streams, reuse=reuse)
    _run(lambda server: many.connections(server, size), (*many.SERVE_ARGS, *serve_args), file)


@resilience.command()
@click.option("--bad", default=10_000, show_default=True, help="Requests that must be refused.")
@click.option("--seed", default=1, show_default=True, help="Of the damage.")
@_json
@_serve_args
def fuzz(bad: int, seed: int, file: Path | None, serve_args: tuple[str, ...]) -> None:
    """Real requests with damaged bytes."""
    size = damaged.FuzzSize(bad=bad, seed=seed)
    _run(lambda server: damaged.fuzz(server, size), (*damaged.SERVE_ARGS, *serve_args), file)


@resilience.command()
@click.option("--seconds", default=10.0, show_default=True, help="Load before the signal.")
@click.option("--clients", default=24, show_default=True, help="Clients at once.")
@_json
@_serve_args
def sigterm(seconds: float, clients: int, file: Path | None, serve_args: tuple[str, ...]) -> None:
    """SIGTERM under load."""
    size = stop.StopSize(clients=clients, seconds=seconds)
    _run(lambda server: stop.sigterm(server, size), (*stop.SERVE_ARGS, *serve_args), file)


@resilience.command()
@click.option("--seconds", default=5.0, show_default=True, help="Load before the kill.")
@click.option("--clients", default=8, show_default=True, help="Clients at once.")
@_json
@_serve_args
def restart(seconds: float, clients: int, file: Path | None, serve_args: tuple[str, ...]) -> None:
    """kill -9 and a new start under openai-python; needs that package."""
    # A dependency of the developers' environment only.
    from octavo.loadtest.resilience import restart as again  # noqa: PLC0415

    size = again.RestartSize(clients=clients, seconds=seconds)
    _run(
        lambda server: again.restart(server, size),
        (*again.SERVE_ARGS, *serve_args),
        file,
        keep_socket=True,
    )
