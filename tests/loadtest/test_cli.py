import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from scripted_server import (
    Answer,
    Asked,
    Route,
    ScriptedServer,
    error_answer,
    json_answer,
    serve,
    stream_answer,
)

from octavo.loadtest.cli import bench


def answer(asked: Asked) -> Answer:
    """As many tokens as were asked for, one a chunk."""
    count = asked.body["max_tokens"]
    chunks = [{"choices": [{"index": 0, "text": "x"}]} for _ in range(count)]
    length = len(asked.body["prompt"])
    usage = {"prompt_tokens": length, "completion_tokens": count}
    return stream_answer(*chunks, {"choices": [], "usage": usage})


ROUTES: dict[str, Route] = {
    "/v1/models": json_answer({"data": [{"id": "served"}]}),
    "/tokenize": json_answer({"tokens": [11, 12, 13]}),
    "/v1/completions": answer,
}


def bench_serve(server: ScriptedServer, *arguments: str, **environment: str) -> Result:
    command = ["serve", "--base-url", server.url, *arguments]
    return CliRunner().invoke(bench, command, env=environment)


def test_a_run_from_prompt_to_file(tmp_path: Path) -> None:
    with serve(**ROUTES) as server:
        result = bench_serve(
            server,
            *("--num-prompts", "5", "--input-len", "8", "--output-len", "3"),
            *("--request-rate", "200", "--max-concurrency", "2", "--num-warmups", "2"),
            *("--ignore-eos", "--label", "night", "--goodput", "ttft:10000 e2el:10000"),
            *("--save-detailed", "--result-dir", str(tmp_path / "new"), "--result-filename", "r"),
        )
    assert result.exit_code == 0, result.output
    bodies = server.bodies("/v1/completions")
    assert len(bodies) == 7
    assert len({tuple(body["prompt"]) for body in bodies}) == 7
    assert all(len(body["prompt"]) == 8 and set(body["prompt"]) <= {11, 12, 13} for body in bodies)
    assert all(body["model"] == "served" and body["ignore_eos"] for body in bodies)
    saved = json.loads((tmp_path / "new" / "r").read_bytes())
    assert (saved["completed"], saved["failed"]) == (5, 0)
    assert (saved["total_input_tokens"], saved["total_output_tokens"]) == (40, 15)
    assert saved["label"] == "night"
    assert saved["backend"] == "openai"
    assert saved["request_goodput"] > 0
    assert saved["max_concurrent_requests"] <= 2
    assert saved["output_lens"] == [3] * 5
    assert "Successful requests:                     5\n" in result.stdout


def test_without_tokenize_prompts_are_text() -> None:
    with serve(**ROUTES) as server:
        del server.routes["/tokenize"]
        bench_serve(server, "--num-prompts", "1", "--input-len", "6", "--output-len", "1")
    (body,) = server.bodies("/v1/completions")
    assert len(body["prompt"].split()) == 6


def test_vocab_size_bounds_the_ids() -> None:
    with serve(**ROUTES) as server:
        bench_serve(server, "--num-prompts", "3", "--output-len", "1", "--vocab-size", "2")
    assert {i for body in server.bodies("/v1/completions") for i in body["prompt"]} == {0, 1}
    assert not server.bodies("/tokenize")


def test_prefix_repetition() -> None:
    with serve(**ROUTES) as server:
        bench_serve(
            server,
            *("--dataset-name", "prefix_repetition", "--num-prompts", "4", "--output-len", "2"),
            *("--prefix-repetition-num-prefixes", "1", "--prefix-repetition-prefix-len", "9"),
            *("--prefix-repetition-suffix-len", "4"),
        )
    bodies = server.bodies("/v1/completions")
    assert len({tuple(body["prompt"][:9]) for body in bodies}) == 1
    assert {len(body["prompt"]) for body in bodies} == {13}


def test_custom_data_set(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 2}')
    with serve(**ROUTES) as server:
        result = bench_serve(
            server, "--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "2"
        )
    assert result.exit_code == 0
    assert [(b["prompt"], b["max_tokens"]) for b in server.bodies("/v1/completions")] == [
        ("one", 2)
    ] * 2


def test_headers_and_key_are_sent() -> None:
    with serve(**ROUTES) as server:
        bench_serve(
            server,
            *("--num-prompts", "1", "--output-len", "1", "--header", "x-team=a=b"),
            OCTAVO_API_KEY="secret",
        )
    for asked in server.asked:
        assert asked.headers["authorization"] == "Bearer secret"
        assert asked.headers["x-team"] == "a=b"


def test_failures_are_counted_and_the_first_ones_shown() -> None:
    with serve(**ROUTES) as server:
        server.routes["/v1/completions"] = error_answer(429, "queue full")
        result = bench_serve(server, "--num-prompts", "6", "--output-len", "1")
    assert result.exit_code == 1
    assert "Failed requests:                         6\n" in result.stdout
    assert result.stderr.count("failed: HTTP 429: queue full\n") == 3


def test_a_failed_warm_up_stops_the_run() -> None:
    with serve(**ROUTES) as server:
        server.routes["/v1/completions"] = error_answer(500, "broken")
        result = bench_serve(server, "--num-warmups", "1", "--output-len", "1")
    assert result.exit_code == 1
    assert "a warm-up request failed: HTTP 500: broken" in result.stderr
    assert len(server.bodies("/v1/completions")) == 1


def test_no_server_is_said() -> None:
    result = CliRunner().invoke(bench, ["serve", "--base-url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "no answer from http://127.0.0.1:9" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--burstiness", "-1"], "--burstiness"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--goodput", "itl:5"], "'itl' is not one of"),
        (["--goodput", "ttft"], "is not of the form"),
        (["--goodput", "ttft:nan"], "is not in"),
        (["--percentile-metrics", "ttft,x"], "'x' is not one of"),
        (["--metric-percentiles", "101"], "is not in 0..100"),
        (["--metric-percentiles", "p99"], "is not a number"),
        (["--extra-body", "[1]"], "not a JSON object"),
        (["--extra-body", "{"], "not JSON"),
        (["--header", "x"], "is not of the form"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--base-url", "127.0.0.1:8000"], "127.0.0.1:8000"),
        (["--plot", "x.png"], "'--plot': 'x.png' does not end in .html or .htm"),
        (["--plot", "missing/x.html"], "'--plot': 'missing/x.html' cannot be written"),
        (["--save-result", "--result-dir", "/proc/x"], "'--result-dir'"),
        (["--result-filename", "r"], "--result-filename does nothing without --save-result"),
        (["--concurrency-sweep", "1,2", "--max-concurrency", "2"], "--concurrency-sweep"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str) -> None:
    result: Any = CliRunner().invoke(bench, ["serve", *arguments])
    assert result.exit_code in (1, 2)
    assert message in result.stderr


def test_a_result_file_that_is_a_folder_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    place = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r"]
    with serve(**ROUTES) as server:
        result = bench_serve(server, "--num-prompts", "1", *place)
    assert result.exit_code == 2
    assert "'--result-filename'" in result.stderr
    assert not server.asked


def test_a_sweep_keeps_the_folder_of_a_result_file(tmp_path: Path) -> None:
    with serve(**ROUTES) as server:
        result = bench_serve(
            server,
            *("--num-prompts", "1", "--output-len", "2", "--concurrency-sweep", "1,2"),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "sub/r.json"),
        )
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in (tmp_path / "sub").iterdir())
    assert names == ["r-concurrency1.json", "r-concurrency2.json"]


def test_a_label_with_a_slash_makes_no_folder(tmp_path: Path) -> None:
    with serve(**ROUTES) as server:
        result = bench_serve(
            server,
            *("--num-prompts", "1", "--output-len", "2", "--label", "a/b"),
            *("--save-result", "--result-dir", str(tmp_path)),
        )
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("a_b-")


def test_a_file_that_made_prompts_leave_out_is_told(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.touch()
    with serve(**ROUTES) as server:
        result = bench_serve(
            server, "--num-prompts", "1", "--output-len", "2", "--dataset-path", str(path)
        )
    assert result.exit_code == 0, result.output
    assert "--dataset-path is not used: --dataset-name random" in result.stderr
