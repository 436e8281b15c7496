"""Command-line flags, OCTAVO_* variables and YAML keys, all made from the configuration's fields.

There is no second list: a field of one of the models in `SECTIONS` is a flag.
"""

import difflib
import enum
import json
import types
import typing
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from octavo.config.base import ConfigModel
from octavo.config.cache import CacheConfig
from octavo.config.device import DeviceConfig
from octavo.config.engine import EngineConfig
from octavo.config.env import PREFIX
from octavo.config.load import LoadConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.config.server import ServerConfig

SECTIONS: Mapping[str, type[ConfigModel]] = {
    "load": LoadConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "server": ServerConfig,
}
_PLAIN_KINDS: Mapping[Any, "Kind"] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "text",
    tuple: "list",
    dict: "json",
}
SECRET_FIELDS = frozenset({"api_key", "admin_key"})
"""Settings whose values are shown nowhere."""


Kind = typing.Literal["bool", "choice", "list", "json", "int", "float", "text"]


class FlagError(ValueError):
    """A setting that cannot be used; the message is one line and names it."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting and its three names."""

    section: str
    field: str
    description: str
    default: Any
    kind: Kind
    choices: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """Name on the command line."""
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        """Name in the environment."""
        return PREFIX + self.field.upper()

    @property
    def key(self) -> str:
        """Name in a YAML file."""
        return self.field.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that somebody gave, with the name they gave it by, for messages."""

    value: Any
    given_as: str


@cache
def all_flags() -> Mapping[str, Flag]:
    """Return every flag by field name."""
    flags: dict[str, Flag] = {}
    for section, model in SECTIONS.items():
        for name, info in model.model_fields.items():
            assert name not in flags, f"two sections have a field {name}"
            flags[name] = _make_flag(section, name, info)
    return flags


def _make_flag(section: str, name: str, info: FieldInfo) -> Flag:
    kind, choices = _kind(info.annotation)
    return Flag(
        section=section,
        field=name,
        description=info.description or "",
        default=info.get_default(call_default_factory=True, validated_data={}),
        kind=kind,
        choices=choices,
    )


def _kind(annotation: Any) -> tuple[Kind, tuple[str, ...]]:  # noqa: ANN401 - any type form
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return "choice", typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.StrEnum):
        return "choice", tuple(member.value for member in annotation)
    return _PLAIN_KINDS[origin or annotation], ()


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a hint such as " Did you mean 'port'?", or nothing where no name is near.

    A `prefix` that all of `known` share makes nothing alike.
    """
    bare = [other.removeprefix(prefix) for other in known]
    matches = difflib.get_close_matches(name.removeprefix(prefix), bare, n=1)
    return f" Did you mean {prefix + matches[0]!r}?" if matches else ""


def settings_from_options(values: Mapping[str, Any]) -> dict[str, Setting]:
    """Turn values of the command line, by field name, into settings; None is not given."""
    flags = all_flags()
    return {
        name: Setting(value, flags[name].option)
        for name, value in values.items()
        if value is not None and value != ()
    }


def settings_from_variables(
    variables: Mapping[str, str],
) -> tuple[dict[str, Setting], list[str]]:
    """Read OCTAVO_* variables.

    Also returns a warning for each unknown one. It is no error, since container platforms set
    variables of their own named after a service.
    """
    by_variable = {flag.variable: flag for flag in all_flags().values()}
    settings: dict[str, Setting] = {}
    warnings: list[str] = []
    for variable, text in variables.items():
        flag = by_variable.get(variable)
        if flag is None:
            hint = nearest(variable, by_variable, PREFIX)
            warnings.append(f"The variable {variable} is not known and has no effect.{hint}")
            continue
        value: Any = text
        if flag.kind == "list":
            value = _split_list(text)
        settings[flag.field] = Setting(value, variable)
    return settings, warnings


def _split_list(text: str) -> list[Any]:
    if text.lstrip().startswith("["):
        try:
            parsed = json.loads(text)
        except json.JSONDecodeError:
            parsed = None
        if isinstance(parsed, list):
            return parsed
    return [part.strip() for part in text.split(",") if part.strip()]


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that names a key twice; YAML itself would let the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise FlagError(
                    f"{key.value!r} is given twice, in lines {lines[key.value]} and {line}"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def settings_from_file(path: Path) -> dict[str, Setting]:
    """Read a YAML file of settings. Raises FlagError."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except FlagError as error:
        raise FlagError(f"--config: {path}: {error}; keep one of them") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"--config: cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        first_line = " ".join(str(error).split())
        raise FlagError(f"--config: {path} is not valid YAML: {first_line}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise FlagError(f"--config: {path} must hold a mapping of settings, such as 'port: 8000'")
    flags = all_flags()
    settings: dict[str, Setting] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in flags:
            hint = nearest(str(key), [flag.key for flag in flags.values()])
            raise FlagError(f"{path}: unknown setting {key!r}.{hint}")
        if name in settings:
            raise FlagError(f"--config: {path} gives {flags[name].key!r} twice, with - and with _")
        if flags[name].kind == "list" and not isinstance(value, list):
            value = [value]
        settings[name] = Setting(value, f"{flags[name].key} in {path}")
    return settings


def build_configs(*sources: Mapping[str, Setting]) -> tuple[ServerConfig, EngineConfig]:
    """Make the configuration; earlier sources win. Raises FlagError."""
    settings: dict[str, Setting] = {}
    for source in sources:
        for name, setting in source.items():
            settings.setdefault(name, setting)
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, setting in settings.items():
        flag = all_flags()[name]
        values[flag.section][name] = _parse_json(flag, setting)
    try:
        server = ServerConfig(**values.pop("server"))
        engine = EngineConfig(
            **{section: SECTIONS[section](**fields) for section, fields in values.items()}
        )
    except ValidationError as error:
        raise FlagError(_one_line(error.errors()[0], settings)) from error
    return server, engine


def _parse_json(flag: Flag, setting: Setting) -> Any:  # noqa: ANN401 - pydantic checks the type
    if flag.kind != "json" or not isinstance(setting.value, str):
        return setting.value
    try:
        return json.loads(setting.value)
    except json.JSONDecodeError as error:
        raise FlagError(f"{setting.given_as}: not valid JSON: {error}") from error


def _one_line(error: ErrorDetails, settings: Mapping[str, Setting]) -> str:
    message = error["msg"].removeprefix("Value error, ")
    name = str(error["loc"][0]) if error["loc"] else ""
    if name not in settings:
        return message
    if name in SECRET_FIELDS:
        return f"{settings[name].given_as}: {message}"
    return f"{settings[name].given_as}: {message}, got {error['input']!r}"
