"""The settings as options of a command."""

from typing import Any

import click

from octavo.config.flags import Flag

_METAVARS = {"int": "INTEGER", "float": "NUMBER", "json": "JSON"}


def flag_option(flag: Flag) -> click.Option:
    """The command-line form of a setting; None stands for one that was not given."""
    names = [flag.option, flag.field]
    if flag.kind == "bool":
        names[0] = f"{flag.option}/--no-{flag.key}"
    kind: click.ParamType[Any] = click.STRING
    if flag.kind == "choice":
        kind = click.Choice(flag.choices)
    elif flag.kind == "bool":
        kind = click.BOOL
    return click.Option(
        names,
        type=kind,
        default=None,
        multiple=flag.kind == "list",
        metavar=_METAVARS.get(flag.kind),
        help=flag.description + _default_text(flag),
    )


def _default_text(flag: Flag) -> str:
    if flag.default is None or flag.default == ():
        return ""
    value = ", ".join(flag.default) if flag.kind == "list" else flag.default
    if flag.kind == "bool":
        value = "on" if flag.default else "off"
    return f"  [default: {value}]" if value != "" else ""
