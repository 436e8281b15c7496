"""`octavo serve` and `octavo env`.

The heavy import is inside the function: flags are checked and the port is opened before seconds
are spent on loading libraries, and the thread settings must be in place before torch is imported.
"""

import gc
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from octavo.config.effective import describe_configs
from octavo.config.engine import EngineConfig
from octavo.config.env import octavo_variables, set_thread_defaults
from octavo.config.flags import (
    FlagError,
    Setting,
    all_flags,
    build_configs,
    settings_from_file,
    settings_from_options,
    settings_from_variables,
)
from octavo.config.options import flag_option
from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.loader import check_local
from octavo.server.environment import describe_environment
from octavo.server.listener import describe, open_listener
from octavo.server.logs import configure_logging

logger = logging.getLogger(__name__)

_USAGE_ERROR = 2
_CONFIG_VARIABLE = "OCTAVO_CONFIG"


def _config_options(command: Callable[..., None]) -> click.Command:
    """Make a command that takes every flag of the configuration."""
    params: list[click.Parameter] = [
        click.Argument(["model_argument"], metavar="[MODEL]", required=False),
        click.Option(
            ["--config", "config_file"],
            metavar="FILE",
            help=f"YAML file of settings; the keys are the flags' names. [env: {_CONFIG_VARIABLE}]",
        ),
        click.Option(
            ["--print-config", "print_config"],
            is_flag=True,
            help="Show the values in force and where each came from, and end.",
        ),
        *(flag_option(flag) for flag in all_flags().values()),
    ]
    return click.Command("serve", callback=command, params=params, help=command.__doc__)


@dataclass(frozen=True, slots=True)
class ReadConfigs:
    """The configuration, the settings it was made of, and warnings for the log."""

    server: ServerConfig
    engine: EngineConfig
    settings: Mapping[str, Setting]
    warnings: Sequence[str]


def read_configs(
    options: dict[str, Any], model: str | None, config_file: str | None
) -> ReadConfigs:
    """Join command line, variables and file. Raises FlagError."""
    if model is not None and options.get("model") is not None:
        raise FlagError("MODEL and --model name the model twice; give one of them")
    given = settings_from_options({**options, "model": model or options.get("model")})
    known = octavo_variables()
    path = config_file or known.pop(_CONFIG_VARIABLE, None)
    variables, warnings = settings_from_variables(known)
    from_file = {} if path is None else settings_from_file(Path(path))
    settings = {**from_file, **variables, **given}
    return ReadConfigs(*build_configs(settings), settings, warnings)


@_config_options
def serve(
    model_argument: str | None,
    config_file: str | None,
    print_config: bool,
    **options: Any,  # noqa: ANN401 - one per field
) -> None:
    """Serve MODEL over HTTP: a directory, a GGUF file or a hub id; without one the starter model.

    Each flag is also a variable OCTAVO_NAME and a key of the YAML file given by --config.
    Command line wins over variable over file over default.
    """
    try:
        configs = read_configs(options, model_argument, config_file)
    except FlagError as error:
        _fail(str(error), _USAGE_ERROR)
    server_config, engine_config = configs.server, configs.engine
    if print_config:
        for warning in configs.warnings:
            click.echo(f"Warning: {warning}", err=True)
        click.echo(describe_configs(server_config, engine_config, configs.settings))
        return
    configure_logging(server_config.log_level, server_config.log_format)
    for warning in configs.warnings:
        logger.warning("%s", warning)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave_early)
    try:
        listener = open_listener(server_config)
        logger.info(
            "Listening on %s; loading libraries and model", describe(server_config, listener)
        )
        check_local(engine_config.load)
        set_thread_defaults()
        # What is made from here on stays. Looking through it again and again for garbage would
        # take a seventh of the start; the server enables it once it is ready.
        gc.disable()
        from octavo.server import serve as server  # noqa: PLC0415 - see the module's docstring

        code = server.run(server_config, engine_config, listener)
    except ConfigurationError as error:
        _fail(str(error), 1)
    server.leave(code)


def _leave_early(number: int, _: object) -> NoReturn:
    """End a start that has nothing to lose yet; once the event loop runs, it takes the signals."""
    logger.info("Stopped by %s before the start was complete", signal.Signals(number).name)
    logging.shutdown()
    os._exit(0)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"Error: {message}", err=True)
    raise SystemExit(code)


@click.command()
def env() -> None:
    """Show what a report about a problem needs: versions, hardware and settings."""
    click.echo("\n".join(describe_environment()))
