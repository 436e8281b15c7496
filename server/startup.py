"""From configuration to a loaded engine; slow, and never run on the event loop."""

import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.engine_loop import EngineLoop
from octavo.engine.executor.profiled import ProfiledExecutor
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.loader import Checkpoint, EncoderCheckpoint, resolve_checkpoint
from octavo.engine.loader.files import is_temporary
from octavo.engine.preload import preload_torch
from octavo.engine.tokenizer import ChatTemplates, Tokenizer
from octavo.server.async_engine import EngineThread, OnFatal, OnStep
from octavo.server.chat_template import ChatTemplate
from octavo.server.loaded_engine import LoadedEngine, Report
from octavo.server.reasoning.formats import FORMATS
from octavo.server.served_model import ServedModel

logger = logging.getLogger(__name__)

_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Files of a model that may hold its chat template, the one that counts first."""


def load_engine(
    server_config: ServerConfig, engine_config: EngineConfig, report: Report
) -> LoadedEngine:
    """Load the configured model. Raises ConfigurationError, of which CheckpointError is one."""
    started = time.monotonic()
    if engine_config.device.device == "cuda" or engine_config.cache.kv_cache_dtype != "auto":
        _check_device(engine_config, report)
    report("finding the model")
    checkpoint = resolve_checkpoint(engine_config.load, partial(_report_download, report))
    logger.info("Loading %s", checkpoint.name)
    # Small files first: a fault in them shows before gigabytes are read.
    tokenizer = Tokenizer.from_directory(
        checkpoint.tokenizer_dir, visible=_reasoning_tags(server_config)
    )
    template = _chat_template(server_config, tokenizer, checkpoint)
    report("importing libraries")
    preload_torch()
    # Not above: it imports torch, and what is wrong with the model's files is told before that.
    from octavo.engine.assembly import (  # noqa: PLC0415
        engine_limits,
        idle_work_of,
        launch_of,
        make_executor,
    )

    # Anyone may ask for the progress: it tells no paths of this machine.
    report(f"loading the weights of {Path(checkpoint.name).name} and warming up")
    executor = make_executor(engine_config, checkpoint)
    limits = engine_limits(engine_config, checkpoint, executor)
    profiled = ProfiledExecutor(executor) if server_config.enable_admin else None
    launch = launch_of(executor, profiled)
    engine = LLMEngine(engine_config, limits, profiled or executor, launch)
    logger.info("Loaded and warmed up in %.1f s", time.monotonic() - started)
    defaults = dict(checkpoint.generation_defaults)
    defaults |= engine_config.load.override_generation_config or {}
    if defaults:
        logger.info("Sampling defaults: %s", defaults)

    def make_thread(on_step: OnStep, on_fatal: OnFatal) -> EngineThread:
        return EngineLoop(engine, on_step, on_fatal, idle_work_of(executor))

    model = ServedModel(
        names=server_config.served_model_name or (checkpoint.name,),
        root=checkpoint.name,
        created=int(time.time()),
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        tokenizer=tokenizer,
        chat_template=template,
        default_sampling_params=defaults,
        embedding=checkpoint.embedding,
        generates=checkpoint.generates,
    )
    return LoadedEngine(model, limits, make_thread, profiled)


def _check_device(engine_config: EngineConfig, report: Report) -> None:
    """Refuse what this machine lacks before a model is downloaded, converted or read for it."""
    report("importing libraries")
    preload_torch()
    # As in `load_engine`: it imports torch.
    from octavo.engine.assembly import check_device  # noqa: PLC0415

    check_device(engine_config)


def _report_download(report: Report, done: int, total: int) -> None:
    report(f"downloading the model: {done / 1e6:.1f} of {total / 1e6:.1f} MB")


def _reasoning_tags(config: ServerConfig) -> tuple[str, ...]:
    """Return the tags that must come out as text, although some models have them as control tokens.

    Without them the reasoning could not be told apart.
    """
    if config.reasoning_parser is None:
        return ()
    form = FORMATS[config.reasoning_parser]
    return form.opening, form.closing


def _chat_template(
    config: ServerConfig, tokenizer: Tokenizer, checkpoint: Checkpoint | EncoderCheckpoint
) -> ChatTemplate:
    templates = _chat_templates(config.chat_template, tokenizer.chat_template)
    try:
        return ChatTemplate(templates, tokenizer, config.chat_template_content_format)
    except ConfigurationError as error:
        source = _template_source(config.chat_template, checkpoint)
        raise ConfigurationError(f"{source}: {error}") from error


def _template_source(given: str | None, checkpoint: Checkpoint | EncoderCheckpoint) -> str:
    """Return where a template came from: `--chat-template`, or a file of the model."""
    if given is not None:
        return "--chat-template" if "{" in given else f"--chat-template {given}"
    directory = checkpoint.tokenizer_dir
    if is_temporary(directory):
        return checkpoint.name
    files = (directory / name for name in _TEMPLATE_FILES)
    return str(next((file for file in files if file.is_file()), directory))


def _chat_templates(given: str | None, own: ChatTemplates) -> ChatTemplates:
    """Return what `--chat-template` says: one of the model's own by name, a text or a file."""
    if given is None:
        return own
    if isinstance(own, Mapping) and given in own:
        return own[given]
    # Jinja text has braces; a name of a file hardly ever does.
    if "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = sorted(own) if isinstance(own, Mapping) else ()
        others = f", nor one of the model's own ({', '.join(names)})" if names else ""
        raise ConfigurationError(
            f"--chat-template: {given} is neither a readable file nor a template{others}: {error}"
        ) from error
