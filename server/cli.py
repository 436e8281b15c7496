"""The `octavo` command. Each subcommand's module is imported when it is called, so that `--help`
and the terminal client do not wait for the model's libraries.
"""

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True)
class _Command:
    module: str
    name: str
    summary: str


COMMANDS: Mapping[str, _Command] = {
    "serve": _Command("octavo.server.commands", "serve", "Serve a model over HTTP."),
    "chat": _Command("octavo.server.terminal.commands", "chat", "Chat with a running server."),
    "complete": _Command(
        "octavo.server.terminal.commands", "complete", "Continue a text on a running server."
    ),
    "bench": _Command("octavo.loadtest.cli", "bench", "Measure servers, the engine, its kernels."),
    "top": _Command("octavo.server.top.commands", "top", "Watch a running server."),
    "blocks": _Command(
        "octavo.server.blocks.commands", "blocks", "Draw the block pool of a running server."
    ),
    "env": _Command("octavo.server.commands", "env", "Show versions and hardware."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and summaries without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = vars(importlib.import_module(entry.module))[entry.name]
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments begin with; an unknown one is told the nearest."""
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        if args[0] not in COMMANDS and near:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


@click.group(cls=LazyGroup)
@click.version_option(package_name="octavo", message="%(version)s")
def main() -> None:
    """Octavo, an OpenAI-compatible inference server for language models."""
