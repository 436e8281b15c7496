"""Documentation that cannot drift from the program."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from prometheus_client.parser import text_string_to_metric_families
from settings_page import render_page

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.core.request_output import EngineStats
from octavo.server.app import create_app
from octavo.server.cli import main
from octavo.server.metrics import REJECTIONS, ServerMetrics

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CODE = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", README, re.DOTALL)).replace("\\\n", " ")
# An own command at the beginning of a line or of a piece of code; other programs may have an
# argument of that name.
OWN = re.compile(r"(?:^|`)(?:\$ )?(?:\.venv/bin/)?octavo ([a-z]+)\b(.*)", re.MULTILINE)


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """All commands below a group that do something, by their full names."""
    context = click.Context(group)
    for child in group.list_commands(context):
        command = group.get_command(context, child)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {child}")
        else:
            yield f"{name} {child}", command


COMMANDS = dict(commands(main, "octavo"))


def options(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_flag_is_described(name: str) -> None:
    assert COMMANDS[name].help
    assert not [option.opts for option in options(COMMANDS[name]) if not option.help]


def test_flags_in_the_readme_exist() -> None:
    known = {
        flag
        for command in COMMANDS.values()
        for option in options(command)
        for flag in (*option.opts, *option.secondary_opts)
    }
    tails = [*(tail for _, tail in OWN.findall(CODE)), *re.findall(r"ARGS=(.*)", CODE)]
    used = {flag for tail in tails for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", tail)}
    assert used <= known | {"--help", "--version"}


def test_commands_in_the_readme_exist() -> None:
    used = {name for name, _ in OWN.findall(CODE)}
    assert used <= {name.split()[1] for name in COMMANDS}


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)\b", CODE)) <= targets


def test_links_in_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#]+)", README)
    assert not [link for link in links if not (ROOT / link).exists()]


def rows(page: str) -> list[list[str]]:
    """Cells of the rows of all tables of a page that begin with code."""
    lines = (ROOT / page).read_text().splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]


def test_the_page_of_flags_is_the_list_of_fields() -> None:
    assert (ROOT / "config" / "README.md").read_text() == render_page(), "run `make docs`"


def test_every_route_is_described_and_every_described_one_exists() -> None:
    described = {
        path for cells in rows("server/README.md") for path in re.findall(r"`(/[^`]*)`", cells[0])
    }
    config = ServerConfig(enable_admin=True, admin_key="k", disable_fastapi_docs=True)
    routes = set(create_app(config, EngineConfig()).openapi()["paths"])

    assert described == routes


def test_every_metric_is_described_with_its_kind() -> None:
    metrics = ServerMetrics()
    metrics.attach_engine("m", {"block_size": "16"}, EngineStats)
    suffix = {"counter": "_total"}
    shown = {
        (f"`{family.name}{suffix.get(family.type, '')}`", family.type)
        for family in text_string_to_metric_families(metrics.render().decode())
    }
    described = {
        (cells[0], cells[1])
        for cells in rows("server/README.md")
        if re.match("`(octavo:|http_|process_)", cells[0])
    }

    assert described == shown


def test_every_label_value_of_a_refusal_is_described() -> None:
    [cells] = [c for c in rows("server/README.md") if "requests_rejected" in c[0]]

    assert cells[2].rpartition("`reason`: ")[2].split(", ") == list(REJECTIONS)
