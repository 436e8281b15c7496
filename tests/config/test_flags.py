"""Flags, variables and YAML keys are one list, made from the fields."""

from pathlib import Path

import pytest

from octavo.config.flags import (
    FlagError,
    all_flags,
    build_configs,
    settings_from_file,
    settings_from_options,
    settings_from_variables,
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


def test_every_field_has_a_description() -> None:
    assert [flag.field for flag in all_flags().values() if not flag.description] == []


def test_option_variable_and_key_are_spellings_of_the_field() -> None:
    flag = all_flags()["max_num_seqs"]

    assert (flag.option, flag.variable, flag.key) == (
        "--max-num-seqs",
        "OCTAVO_MAX_NUM_SEQS",
        "max-num-seqs",
    )


def test_every_flag_can_be_given_in_all_three_ways(tmp_path: Path) -> None:
    samples = {"bool": "true", "list": "x", "json": '{"a": 1}'}
    overrides = {"ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "gpu_memory_utilization"}
    overrides |= {"enable_admin", "key_max_concurrency", "key_rpm"}
    flags = [flag for flag in all_flags().values() if flag.field not in overrides]
    for flag in flags:
        text = flag.choices[-1] if flag.kind == "choice" else samples.get(flag.kind, "1")
        if flag.field == "override_generation_config":
            text = '{"top_k": 1}'
        if flag.field == "otlp_endpoint":
            text = "http://collector"
        option = (text,) if flag.kind == "list" else text
        quoted = f'"{text}"' if flag.kind in ("text", "choice") else text
        results = [
            build_configs(settings_from_options({flag.field: option})),
            build_configs(settings_from_variables({flag.variable: text})[0]),
            build_configs(settings_from_file(write(tmp_path, f"{flag.key}: {quoted}"))),
        ]
        assert results[0] == results[1] == results[2], flag.field
        assert results[0] != build_configs() or text == str(flag.default).lower(), flag.field


def test_command_line_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = settings_from_file(write(tmp_path, "port: 1\nhost: file\nblock_size: 8\n"))
    variables, _ = settings_from_variables({"OCTAVO_PORT": "2", "OCTAVO_HOST": "variable"})
    options = settings_from_options({"port": "3"})

    server, engine = build_configs(options, variables, file)

    assert (server.port, server.host, engine.cache.block_size) == (3, "variable", 8)
    assert engine.cache.enable_prefix_caching is True


def test_unknown_yaml_key_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match=r"unknown setting 'prot'.*Did you mean 'port'"):
        settings_from_file(write(tmp_path, "prot: 8000"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nhost: x\nport: 2\n", "'port' is given twice, in lines 1 and 3"),
        ("default-chat-template-kwargs:\n  a: 1\n  a: 2\n", "'a' is given twice, in lines 2 and 3"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "'max-num-seqs' twice, with - and with _"),
    ],
)
def test_a_key_given_twice_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FlagError, match=message):
        settings_from_file(write(tmp_path, text))


@pytest.mark.parametrize("text", ["- a\n- b\n", "port: [", "\0"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FlagError, match="--config"):
        settings_from_file(write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="cannot read"):
        settings_from_file(tmp_path / "absent.yaml")


def test_unknown_variable_is_a_warning_with_the_nearest() -> None:
    settings, warnings = settings_from_variables({"OCTAVO_PROT": "1"})

    assert settings == {}
    assert "OCTAVO_PROT" in warnings[0] and "OCTAVO_PORT" in warnings[0]


def test_an_unknown_variable_far_from_all_gets_no_hint() -> None:
    _, warnings = settings_from_variables({"OCTAVO_FOO": "1"})

    assert warnings == ["The variable OCTAVO_FOO is not known and has no effect."]


@pytest.mark.parametrize("text", ["a,b", '["a", "b"]', " a , b,"])
def test_a_list_in_a_variable(text: str) -> None:
    server, _ = build_configs(settings_from_variables({"OCTAVO_API_KEY": text})[0])

    assert server.api_key == ("a", "b")


def test_a_bad_value_is_one_line_that_names_the_flag() -> None:
    with pytest.raises(FlagError) as caught:
        build_configs(settings_from_options({"port": "99999"}))

    message = str(caught.value)
    assert message.startswith("--port: ") and "65535" in message and "\n" not in message


def test_a_bad_value_names_the_variable_it_came_from() -> None:
    with pytest.raises(FlagError, match="OCTAVO_PORT: "):
        build_configs(settings_from_variables({"OCTAVO_PORT": "tcp://10.0.0.1:8000"})[0])


def test_a_collector_is_named_by_a_url() -> None:
    with pytest.raises(FlagError, match="--otlp-endpoint: must be a URL such as http://"):
        build_configs(settings_from_options({"otlp_endpoint": "localhost:4318"}))


def test_a_check_across_fields_names_both_flags() -> None:
    options = settings_from_options({"max_num_seqs": "10", "max_num_batched_tokens": "5"})

    with pytest.raises(FlagError, match=r"--max-num-batched-tokens 5 is below --max-num-seqs 10"):
        build_configs(options)


def test_an_api_key_is_never_repeated_in_a_message() -> None:
    with pytest.raises(FlagError) as caught:
        build_configs({**settings_from_options({"api_key": ("  ", "hidden")})})

    assert "hidden" not in str(caught.value)


def test_bad_json_names_the_flag() -> None:
    with pytest.raises(FlagError, match="--default-chat-template-kwargs: not valid JSON"):
        build_configs(settings_from_options({"default_chat_template_kwargs": "{x"}))


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "all", "1000", "auto2"])
def test_threads_are_auto_or_a_number(text: str) -> None:
    with pytest.raises(FlagError, match="--cpu-threads: must be auto or a number from 1 to 999"):
        build_configs(settings_from_options({"cpu_threads": text}))
