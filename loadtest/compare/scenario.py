"""What is compared: a TOML file that names servers, how they are started, and workloads."""

import re
import shlex
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from octavo.loadtest.dataset import check_dataset
from octavo.loadtest.options import BenchOptions, parse_bench_flags

Flags = Mapping[str, bool | int | float | str]
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
# What the comparison sets itself.
_OWN_FLAGS = frozenset(
    {
        *("base-url", "seed", "plot", "concurrency-sweep"),
        *("save-result", "save-detailed", "result-dir", "result-filename"),
    }
)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Server(_Table):
    """A server to start, or with `base_url` one that runs already and is left alone.

    `command` is split as a shell would, and started without one. `ready` is the path that answers
    200 once requests are served. `flags` are flags of `octavo bench serve` for this server only.
    """

    name: str = Field(min_length=1)
    command: str | None = None
    base_url: str | None = None
    ready: str = "/health"
    environment: Mapping[str, str] = Field(default_factory=dict)
    start_timeout: float = Field(default=600, gt=0)
    stop_timeout: float = Field(default=60, gt=0)
    flags: Flags = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.command is None) == (self.base_url is None):
            raise ValueError("give either command or base_url")
        if self.command is not None and "{port}" not in self.command:
            raise ValueError("command does not say {port}, so nobody could find the server")
        return self

    def arguments(self, variables: Mapping[str, str], port: int) -> list[str]:
        """The command's words with {port} and all variables filled in.

        Raises ValueError for a name in braces that is no variable.
        """
        known = {**variables, "port": str(port)}

        def fill(match: re.Match[str]) -> str:
            if match[1] not in known:
                raise ValueError(f"server {self.name}: {match[0]} is not one of the variables")
            return known[match[1]]

        words = [_PLACEHOLDER.sub(fill, word) for word in shlex.split(self.command or "")]
        if self.environment:
            words = ["env", *(f"{key}={value}" for key, value in self.environment.items()), *words]
        return words


class Workload(_Table):
    """A load; `flags` are flags of `octavo bench serve` without the dashes."""

    name: str = Field(min_length=1)
    flags: Flags = Field(default_factory=dict)


_NamedT = TypeVar("_NamedT", Server, Workload)


class Scenario(_Table):
    """Everything that one comparison needs; the first server is the one compared with the rest.

    `server_cores` and `client_cores` pin servers and client; empty lists leave them free.
    """

    rounds: int = Field(default=3, ge=1)
    server_cores: tuple[int, ...] = ()
    client_cores: tuple[int, ...] = ()
    variables: Mapping[str, str] = Field(default_factory=dict)
    defaults: Flags = Field(default_factory=dict)
    servers: tuple[Server, ...] = Field(min_length=1)
    workloads: tuple[Workload, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for kind, items in (("servers", self.servers), ("workloads", self.workloads)):
            names = [item.name for item in items]
            if len(set(names)) < len(names):
                raise ValueError(f"two {kind} have the same name")
        for server in self.servers:
            for workload in self.workloads:
                self.options(server, workload)
        return self

    def options(self, server: Server, workload: Workload) -> BenchOptions:
        """The options of one run. Raises ValueError for flags that `bench serve` would refuse."""
        flags = {**self.defaults, **workload.flags, **server.flags}
        # Prompts are the same for all, so they are made of what every server takes.
        words = ["--text-prompts"]
        for name, value in flags.items():
            if name in _OWN_FLAGS:
                raise ValueError(f"{workload.name}: {name} is set by the comparison itself")
            if value is not False:
                words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        try:
            options = parse_bench_flags(words)
            check_dataset(options)
        except (click.UsageError, ValueError) as error:
            text = error.format_message() if isinstance(error, click.UsageError) else error
            raise ValueError(f"{server.name}, {workload.name}: {text}") from error
        return options

    def check_given(self, names: Collection[str], own: Collection[str]) -> None:
        """Refuse a name that is no variable of the file's `own` and stands in no command.

        Raises ValueError.
        """
        known = set(own).union(
            *(_PLACEHOLDER.findall(server.command or "") for server in self.servers)
        ) - {"port"}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"--set {unknown[0]}: not one of the scenario's variables, which are"
                f" {', '.join(sorted(known)) or 'none'}"
            )

    def chosen(self, servers: list[str], workloads: list[str]) -> Self:
        """Only what is named; an empty list keeps all. Raises ValueError for an unknown name."""
        return self.model_copy(
            update={
                "servers": _chosen("server", self.servers, servers),
                "workloads": _chosen("workload", self.workloads, workloads),
            }
        )


def _chosen(kind: str, items: tuple[_NamedT, ...], names: list[str]) -> tuple[_NamedT, ...]:
    known = {item.name for item in items}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no {kind} is called {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(item for item in items if not names or item.name in names)


def read_scenario(path: Path, variables: Mapping[str, str]) -> Scenario:
    """Read the file; `variables` win over its own. Raises ValueError with what is wrong."""
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        own = content.get("variables", {})
        content["variables"] = {**own, **variables}
        scenario = Scenario.model_validate(content)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{path}: {place + ': ' if place else ''}{message}") from error
    scenario.check_given(variables, own)
    return scenario
