"""`octavo bench memory`, whose commands are imported once they are looked for."""

import importlib

import click

from octavo.config.env import set_thread_defaults


class LateGroup(click.Group):
    """The commands load the engine and torch: `octavo bench serve` does not wait for that."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands."""
        return self._load().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand."""
        return self._load().get_command(ctx, cmd_name)

    def _load(self) -> click.Group:
        # Before torch is imported.
        set_thread_defaults()
        group = vars(importlib.import_module("octavo.loadtest.memory.commands"))["commands"]
        assert isinstance(group, click.Group)
        return group


@click.group(cls=LateGroup)
def memory() -> None:
    """Measure what paged memory saves and costs. The engine runs in this process."""
