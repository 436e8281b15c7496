"""What a start tells while it runs, and what it makes of the settings."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_fixtures import END_THINK_ID, EOS_ID

from octavo.config.engine import EngineConfig
from octavo.config.load import LoadConfig
from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ConfigurationError
from octavo.server.served_model import ServedModel
from octavo.server.startup import load_engine

MakeMarkov = Callable[..., Path]


def test_the_progress_names_the_model_without_its_path(random_llama_dir: Path) -> None:
    stages: list[str] = []
    load(random_llama_dir, report=stages.append)
    assert any(random_llama_dir.name in stage for stage in stages)
    assert not any(str(random_llama_dir.parent) in stage for stage in stages)


BEGIN = """
import sys
from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.core.errors import ConfigurationError
from octavo.server.loaded_engine import load_engine
config = EngineConfig.model_validate({"load": {"model": sys.argv[1]}})
try:
    load_engine(ServerConfig(), config, lambda stage: None)
except ConfigurationError as error:
    sys.exit(f"{'torch' in sys.modules} {error}")
"""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b'{"model": {"type": "none"}}', "no usable tokenizer"),
        ("chat_template.jinja", b"{% for %}", "chat_template.jinja: "),
        ("cut.gguf", b"GGUF" + struct.pack("<IQQ", 3, 1, 1), "perhaps cut off"),
    ],
)
def test_damaged_files_are_told_before_torch_is_imported(
    random_llama_dir: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    directory = Path(shutil.copytree(random_llama_dir, tmp_path / "model"))
    (directory / name).write_bytes(content)
    model = directory / name if name.endswith(".gguf") else directory
    command = [sys.executable, "-W", "ignore", "-c", BEGIN, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.stderr.startswith("False ") and message in done.stderr


def load(
    directory: Path, report: Callable[[str], None] = lambda stage: None, **server: Any
) -> ServedModel:
    config = EngineConfig.model_validate(
        {
            "load": {"model": str(directory), "load_format": "null"},
            "cache": {"num_gpu_blocks_override": 64},
            "device": {"device": "cpu"},
        }
    )
    return load_engine(ServerConfig(**server), config, report).model


@pytest.fixture
def named_templates(markov_dir: MakeMarkov) -> Path:
    """A model with the templates default and rag."""
    path = markov_dir()
    config = path / "tokenizer_config.json"
    names = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": names}))
    return path


@pytest.mark.parametrize(("given", "text"), [(None, "D"), ("rag", "R"), ("{{ 1 }}", "1")])
def test_a_template_of_the_model_by_its_name(
    named_templates: Path, given: str | None, text: str
) -> None:
    template = load(named_templates, chat_template=given).chat_template
    assert template.render([{"role": "user", "content": "hi"}]) == text


def test_the_names_of_templates_are_told(named_templates: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--chat-template.*default, rag"):
        load(named_templates, chat_template="other")


BROKEN = "{% for message in messages %}"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", None])
def test_a_broken_template_names_its_file(
    markov_dir: MakeMarkov, tmp_path: Path, name: str | None
) -> None:
    path = markov_dir()
    file = tmp_path / "other.jinja" if name is None else path / name
    content = BROKEN
    if name == "tokenizer_config.json":
        content = json.dumps(json.loads(file.read_text()) | {"chat_template": BROKEN})
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=r"not valid Jinja.*--chat-template") as caught:
        load(path, chat_template=str(file) if name is None else None)
    assert str(file) in str(caught.value)


def test_a_broken_template_given_as_text_is_told(markov_dir: MakeMarkov) -> None:
    with pytest.raises(ConfigurationError, match=r"^--chat-template: .*not valid Jinja"):
        load(markov_dir(), chat_template=BROKEN)


def test_the_tags_of_the_reasoning_are_text(named_templates: Path) -> None:
    tokenizer = named_templates / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    for token in content["added_tokens"]:
        token["special"] = True
    tokenizer.write_text(json.dumps(content))
    assert END_THINK_ID in load(named_templates).tokenizer.special_ids
    shown = load(named_templates, reasoning_parser="qwen3").tokenizer
    assert END_THINK_ID not in shown.special_ids
    assert EOS_ID in shown.special_ids


def test_sampling_defaults_of_the_operator_go_over_the_models(markov_dir: MakeMarkov) -> None:
    path = markov_dir(generation_config={"temperature": 0.7, "top_k": 20})
    load_config: dict[str, Any] = {"model": str(path), "load_format": "null"}
    load_config["override_generation_config"] = {"temperature": 0.5, "min_p": 0.1}
    config = EngineConfig.model_validate(
        {"load": load_config, "cache": {"num_gpu_blocks_override": 64}, "device": {"device": "cpu"}}
    )
    model = load_engine(ServerConfig(), config, lambda stage: None).model
    assert model.default_sampling_params == {"temperature": 0.5, "top_k": 20, "min_p": 0.1}


@pytest.mark.parametrize(
    ("defaults", "named"),
    [
        ({"temperatur": 1}, "temperatur is none of temperature"),
        ({"temperature": 3}, "temperature must be a number from 0 to 2"),
        ({"top_p": float("nan")}, "top_p must be"),
        ({"min_p": True}, "min_p must be"),
        ({"top_k": 1.5}, "top_k must be an integer"),
    ],
)
def test_sampling_defaults_that_cannot_work_are_refused(
    defaults: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        LoadConfig(override_generation_config=defaults)


@pytest.mark.parametrize(
    ("parts", "flag"),
    [
        ({"device": {"device": "cuda"}}, "--device cuda"),
        ({"cache": {"kv_cache_dtype": "fp8"}}, "--kv-cache-dtype fp8"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_the_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: dict[str, Any], flag: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = EngineConfig.model_validate({"load": {"model": str(tmp_path / "none")}, **parts})
    with pytest.raises(ConfigurationError, match=flag):
        load_engine(ServerConfig(), config, lambda stage: None)
