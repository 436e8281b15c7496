"""The command line: flags, refusals and exit codes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.config.flags import FlagError, all_flags
from octavo.server.cli import COMMANDS, main
from octavo.server.commands import read_configs, serve

OCTAVO = Path(sys.executable).with_name("octavo")


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(OCTAVO), *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


def test_help_names_every_command_and_imports_none_of_them() -> None:
    script = (
        "import sys\n"
        "from octavo.server.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'pydantic', 'httpx'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    for name, command in COMMANDS.items():
        assert f"  {name} " in done.stdout and command.summary in done.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_can_be_imported(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])

    assert result.exit_code == 0, result.output


def test_the_flags_of_serve_are_exactly_the_fields() -> None:
    options = {param.name for param in serve.params}

    assert options == {"model_argument", "config_file", "print_config", *all_flags()}


def test_every_flag_is_listed_in_help() -> None:
    text = CliRunner().invoke(main, ["serve", "--help"], terminal_width=200).output

    assert [flag.option for flag in all_flags().values() if f"{flag.option} " not in text] == []


def test_an_unknown_command_is_refused_with_the_nearest() -> None:
    result = CliRunner().invoke(main, ["serv"])

    assert result.exit_code == 2
    assert "No such command 'serv'. Did you mean 'serve'?" in result.output


def test_an_unknown_flag_is_refused_with_the_nearest() -> None:
    result = CliRunner().invoke(main, ["serve", "--max-model-length", "5"])

    assert result.exit_code == 2
    assert "No such option" in result.output and "--max-model-len" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--port", "x"], "--port: Input should be a valid integer"),
        (["--block-size", "0"], "--block-size: Input should be greater than or equal to 1"),
        (["--dtype", "int8"], "Invalid value for '--dtype'"),
        (["--config", "/no/such/file"], "--config: cannot read /no/such/file"),
        (["a", "--model", "b"], "MODEL and --model name the model twice"),
        (["--ssl-keyfile", "k"], "--ssl-keyfile and --ssl-certfile belong together"),
    ],
)
def test_a_bad_setting_is_one_line_and_code_2(args: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["serve", *args])

    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_options_variables_and_file_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("port: 1\nhost: file\nserved-model-name: [a, b]\n")
    monkeypatch.setenv("OCTAVO_CONFIG", str(path))
    monkeypatch.setenv("OCTAVO_HOST", "variable")

    read = read_configs({"port": "3"}, "models/tiny", None)
    server, engine = read.server, read.engine

    assert (server.port, server.host) == (3, "variable")
    assert server.served_model_name == ("a", "b")
    assert engine.load.model == "models/tiny"
    assert read.warnings == []


def test_a_flag_for_false_wins_over_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_ENABLE_PREFIX_CACHING", "true")
    seen: dict[str, Any] = {}
    context = serve.make_context("serve", ["--no-enable-prefix-caching"])
    seen.update(context.params)
    options = {name: seen[name] for name in all_flags()}

    engine = read_configs(options, None, None).engine

    assert engine.cache.enable_prefix_caching is False


def test_a_file_named_twice_is_read_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CONFIG", "/no/such/file")
    (tmp_path / "c.yaml").write_text("port: 5")

    assert read_configs({}, None, str(tmp_path / "c.yaml")).server.port == 5
    with pytest.raises(FlagError):
        read_configs({}, None, None)


def test_print_config_names_the_source_of_each_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("port: 1\nserved-model-name: [a, b]\napi-key: hidden-one\n")
    monkeypatch.setenv("OCTAVO_DTYPE", "float32")
    args = ["serve", "some/model", "--config", str(path), "--admin-key", "hidden-two"]
    result = CliRunner().invoke(main, [*args, "--print-config"])

    lines = dict(line.split(": ", 1) for line in result.output.splitlines())
    assert result.exit_code == 0
    assert [key.removeprefix("# ") for key in lines] == [f.key for f in all_flags().values()]
    assert lines["port"] == f"1  # port in {path}"
    assert lines["dtype"] == "float32  # OCTAVO_DTYPE"
    assert lines["model"] == "some/model  # --model"
    assert lines["block-size"] == "16  # default"
    assert lines["# api-key"] == f"(not shown)  # api-key in {path}"
    assert "hidden" not in result.output


def test_print_config_warns_beside_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PROT", "1")
    result = CliRunner().invoke(main, ["serve", "--print-config"])

    assert result.exit_code == 0
    assert "OCTAVO_PROT" in result.stderr and "OCTAVO_PROT" not in result.stdout


def test_what_print_config_shows_can_be_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}# {{ m }}: 'x'{% endfor %}"
    args = ["--chat-template", template, "--default-chat-template-kwargs", '{"a": 1.5}']
    args += ["--served-model-name", "a: b", "--load-format", "null", "--seed", "0"]
    args += ["--api-key", "secret", "--admin-key", "other"]
    shown = CliRunner().invoke(main, ["serve", *args, "--print-config"]).output
    (tmp_path / "shown.yaml").write_text(shown)

    read = read_configs({}, None, str(tmp_path / "shown.yaml"))

    assert read.server.chat_template == template
    assert read.server.default_chat_template_kwargs == {"a": 1.5}
    assert read.server.served_model_name == ("a: b",)
    assert not read.server.api_key
    assert not read.server.admin_key
    assert (read.engine.load.load_format, read.engine.load.seed) == ("null", 0)


def test_g05_a_port_in_use_ends_the_start_without_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = run("serve", "/no/such/model", "--port", port)

    assert done.returncode == 1
    assert f"Port {port} on 127.0.0.1 is in use" in done.stderr
    assert "/no/such/model" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_start_that_has_just_begun(number: signal.Signals) -> None:
    command = [str(OCTAVO), "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "Listening on" in process.stderr.readline()
        process.send_signal(number)
        rest = process.stderr.read()

    assert process.returncode == 0
    assert "Traceback" not in rest


def test_a_model_that_is_not_there_ends_the_start_with_code_1(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = run("serve", str(tmp_path / "empty"), "--port", "0")

    assert done.returncode == 1
    assert "empty" in done.stderr and "Traceback" not in done.stderr


def test_env_shows_versions_hardware_and_settings_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "hidden")
    monkeypatch.setenv("OCTAVO_PORT", "9000")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    result = CliRunner().invoke(main, ["env"])

    assert result.exit_code == 0
    lines = dict(line.split(": ", 1) for line in result.output.splitlines())
    assert {"python", "system", "octavo", "torch", "cpu", "memory", "gpu"} <= set(lines)
    assert "cores usable" in lines["cpu"] and "GiB" in lines["memory"]
    assert lines["OCTAVO_PORT"] == "9000" and lines["CUDA_VISIBLE_DEVICES"] == "1"
    assert lines["OCTAVO_API_KEY"] == "(not shown)"
    assert "hidden" not in result.output
