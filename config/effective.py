"""The configuration as it is in force, and where each value came from."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from octavo.config.engine import EngineConfig
from octavo.config.flags import SECRET_FIELDS, Flag, Setting, all_flags
from octavo.config.server import ServerConfig

_HIDDEN = "(not shown)"


def describe_configs(
    server: ServerConfig, engine: EngineConfig, settings: Mapping[str, Setting]
) -> str:
    """Return a YAML file of all values, each with a comment that names its source.

    `settings` are those that somebody gave. Secrets that are set are not shown and commented out.
    """
    values = {name: getattr(server, name) for name in ServerConfig.model_fields}
    for section in EngineConfig.model_fields:
        values |= dict(getattr(engine, section))
    return "\n".join(
        _line(flag, values[name], _source(settings.get(name))) for name, flag in all_flags().items()
    )


def _line(flag: Flag, value: Any, source: str) -> str:  # noqa: ANN401 - any field's value
    if flag.field in SECRET_FIELDS and value:
        # A comment: read back, what stands for a key would be a key that everybody knows.
        return f"# {flag.key}: {_HIDDEN}  # {source}"
    return f"{flag.key}: {_render(value)}  # {source}"


def _source(setting: Setting | None) -> str:
    return "default" if setting is None else setting.given_as


def _render(value: Any) -> str:  # noqa: ANN401 - any field's value
    if isinstance(value, tuple | dict):
        return json.dumps(value)
    plain = value if value is None or isinstance(value, bool | int | float) else str(value)
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
