"""Scenarios, the order of the runs, what is started and stopped, and the ratios."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from octavo.loadtest.cli import bench
from octavo.loadtest.compare.report import FIGURES, Comparison
from octavo.loadtest.compare.rounds import Measurement
from octavo.loadtest.compare.scenario import Scenario, read_scenario

EXAMPLES = sorted((Path(__file__).parents[2] / "loadtest" / "scenarios").glob("*.toml"))

# A server of two tokens an answer; each line of its log says what happened and on which cores.
SERVER = """
import json, os, signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

name, port, log = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], "a", buffering=1)

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        known = {"/health": b"{}", "/v1/models": b'{"data": [{"id": "m"}]}'}
        body = known.get(self.path)
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        log.write(json.dumps(["asked", name, asked["prompt"]]) + "\\n")
        self.send_response(200)
        self.end_headers()
        for finish in (None, "length"):
            chunk = {"choices": [{"text": "x", "finish_reason": finish}]}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")

def stop(*_):
    log.write(json.dumps(["stopped", name]) + "\\n")
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
log.write(json.dumps(["started", name, sorted(os.sched_getaffinity(0))]) + "\\n")
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Bench:
    """Runs `octavo bench compare` on servers that write what happens to one log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.core = min(os.sched_getaffinity(0))
        (folder / "server.py").write_text(SERVER)

    def command(self, name: str) -> str:
        return f"{sys.executable} {self.folder}/server.py {name} {{port}} {self.folder}/log"

    def run(self, servers: dict[str, str], *arguments: str) -> Result:
        return CliRunner().invoke(bench, self.arguments(servers, *arguments))

    def arguments(self, servers: dict[str, str], *arguments: str) -> list[str]:
        tables = [
            f"[[servers]]\nname = {json.dumps(name)}\n{text}" for name, text in servers.items()
        ]
        scenario = self.folder / "scenario.toml"
        scenario.write_text(
            f"rounds = 2\nserver_cores = [{self.core}]\n"
            "[defaults]\nnum-prompts = 2\noutput-len = 2\ninput-len = 5\n"
            '[[workloads]]\nname = "w"\n' + "\n".join(tables)
        )
        folder = ["--result-dir", str(self.folder / "results")]
        return ["compare", str(scenario), *folder, *arguments]

    def log(self, kind: str) -> list[Any]:
        lines = map(json.loads, (self.folder / "log").read_text().splitlines())
        return [line[1:] for line in lines if line[0] == kind]

    def result(self, name: str) -> str:
        (folder,) = (self.folder / "results").iterdir()
        return (folder / name).read_text()


@pytest.fixture
def compared(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_two_servers_in_rounds(compared: Bench) -> None:
    names = ("a", "b")
    result = compared.run({name: f"command = '{compared.command(name)}'" for name in names})
    assert result.exit_code == 0, result.output
    # One at a time, on the cores of the scenario, and the second round begins with the second.
    assert compared.log("started") == [[name, [compared.core]] for name in ("a", "b", "b", "a")]
    assert compared.log("stopped") == [["a"], ["b"], ["b"], ["a"]]
    prompts = [(name, prompt) for name, prompt in compared.log("asked")]
    rounds = [{prompt for _, prompt in prompts[i : i + 4]} for i in (0, 4)]
    assert len(rounds[0]) == len(rounds[1]) == 2  # the same for both servers
    assert not rounds[0] & rounds[1]
    assert {name for name, _ in prompts[:2]} == {"a"}
    saved = json.loads(compared.result("comparison.json"))
    assert [(run["server"], run["round"]) for run in saved["runs"]] == [
        *(("a", 0), ("b", 0), ("b", 1), ("a", 1))
    ]
    assert saved["ratios"]["w"]["b"]["output_throughput"] > 0
    assert "<svg" in compared.result("comparison.html")
    assert "a against b" in result.stdout


def test_a_server_that_does_not_start_leaves_the_others(compared: Bench) -> None:
    broken = f"command = '''{sys.executable} -c \"print({{port}}); raise SystemExit(3)\"'''"
    result = compared.run(
        {"good": f"command = '{compared.command('good')}'", "broken": broken}, "--rounds", "1"
    )
    assert result.exit_code == 1
    assert "round 1, broken, w: broken ended with code 3" in result.stderr
    runs = json.loads(compared.result("comparison.json"))["runs"]
    assert [run["figures"] is None for run in runs] == [False, True]


def test_the_server_is_stopped_with_a_comparison_that_is_terminated(compared: Bench) -> None:
    never = f"command = '{compared.command('a')}'\nready = '/never'"
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", "from octavo.loadtest.cli import bench; bench()"),
            *compared.arguments({"a": never}),
        ]
    )
    while not (compared.folder / "log").exists() or not compared.log("started"):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait() != 0
    assert compared.log("stopped") == [["a"]]


def test_one_server_can_be_chosen(compared: Bench) -> None:
    servers = {name: f"command = '{compared.command(name)}'" for name in ("a", "b")}
    result = compared.run(servers, "--server", "b", "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert [name for name, _ in compared.log("started")] == ["b"]


@pytest.mark.parametrize(
    ("servers", "arguments", "message"),
    [
        ({"a": "command = 'x'"}, [], "command does not say {port}"),
        ({"a": ""}, [], "give either command or base_url"),
        ({"a": "command = 'x {port}'\nbase_url = 'http://x'"}, [], "give either command"),
        ({"a": "command = 'x {port}'\nspeed = 1"}, [], "servers.0.speed"),
        ({"a": "command = 'x {port}'\nflags = {seed = 1}"}, [], "seed is set by the comparison"),
        ({"a": "command = 'x {port}'\nflags = {input-lem = 1}"}, [], "--input-lem"),
        ({"a": "command = 'x {port}'"}, ["--server", "c"], "no server is called 'c'"),
        ({"a": "command = 'x {port}'"}, ["--set", "x"], "not of the form"),
        ({"a": "command = 'x {port} {what}'"}, [], "{what} is not one of the variables"),
        ({"a": "command = 'x {port'"}, [], "command does not say {port}"),
        ({"a": "command = 'x {port}'"}, ["--set", "what=3"], "--set what"),
        ({"a": "command = 'x {port}'"}, ["--set", "port=3"], "--set port"),
        ({"a": "command = 'x {port}'"}, ["--result-dir", "/proc/x"], "'--result-dir'"),
        ({"a": "command = 'x {port}'\nflags = {dataset-name = 'custom'}"}, [], "--dataset-path"),
        ({"a": "command = 'x {port}'\nflags = {save-detailed = true}"}, [], "save-detailed is set"),
    ],
)
def test_bad_scenarios_are_refused(
    compared: Bench, servers: dict[str, str], arguments: list[str], message: str
) -> None:
    result = compared.run(servers, *arguments)
    assert result.exit_code in (1, 2)
    assert message in result.stderr


def test_a_missing_variable_is_told_before_another_server_is_measured(compared: Bench) -> None:
    good = f"command = '{compared.command('good')}'"
    result = compared.run({"good": good, "bad": "command = 'x {port} {what}'"})
    assert result.exit_code == 2
    assert "{what} is not one of the variables" in result.stderr
    assert not (compared.folder / "log").exists()


def test_a_core_that_the_machine_lacks_is_refused_before_a_round(compared: Bench) -> None:
    compared.core = 99_999
    result = compared.run({"a": f"command = '{compared.command('a')}'"})
    assert result.exit_code == 2
    assert "core 99999 is not among those this process may use" in result.stderr
    assert not (compared.folder / "log").exists()


def test_a_variable_can_be_given(compared: Bench) -> None:
    python = f"command = '{{python}} {compared.folder}/server.py a {{port}} {compared.folder}/log'"
    result = compared.run({"a": python}, "--rounds", "1", "--set", f"python={sys.executable}")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_valid(path: Path) -> None:
    names = ("model", "gguf") if "{gguf}" in path.read_text() else ("model",)
    scenario = read_scenario(path, dict.fromkeys(names, "given"))
    for server in scenario.servers:
        words = server.arguments(scenario.variables, 1234)
        assert any("1234" in word for word in words)
        assert not any("{" in word for word in words)


def test_answers_of_another_length_are_told(compared: Bench) -> None:
    short = f"command = '{compared.command('a')}'\nflags = {{output-len = 3}}"
    result = compared.run({"a": short}, "--rounds", "1")
    assert "2 answers are not as long as asked for" in result.stdout
    assert "2 answers are not as long as asked for" in compared.result("comparison.html")
    (run,) = json.loads(compared.result("comparison.json"))["runs"]
    assert run["off_length"] == 2


def test_answers_as_long_as_asked_for_are_no_fault(compared: Bench) -> None:
    result = compared.run({"a": f"command = '{compared.command('a')}'"}, "--rounds", "1")
    assert "as long as" not in result.output
    assert json.loads(compared.result("comparison.json"))["faults"] == []


def comparison(rates: dict[str, list[float | None]]) -> Comparison:
    """One workload; the latencies are the reverse of the rates."""
    scenario = Scenario.model_validate(
        {
            "rounds": len(next(iter(rates.values()))),
            "servers": [{"name": name, "base_url": "http://x"} for name in rates],
            "workloads": [{"name": "w"}],
        }
    )
    runs = [
        Measurement(
            name,
            "w",
            number,
            None
            if rate is None
            else {f.key: rate if f.rate else 1000 / rate for f in FIGURES}
            | {"failed": 0, "total_input_tokens": 10},
        )
        for name, values in rates.items()
        for number, rate in enumerate(values)
    ]
    return Comparison(scenario, runs)


def test_ratios_are_of_the_same_round_and_above_one_where_the_first_is_better() -> None:
    found = comparison({"ours": [100.0, 90.0, None], "peer": [50.0, 30.0, 10.0]})
    for figure in FIGURES:
        assert found.ratios("peer", "w", figure) == pytest.approx([2.0, 3.0])
    assert len(found.failed) == 1


def test_medians_stand_with_lowest_and_highest() -> None:
    text = comparison({"ours": [100.0, 130.0, 90.0], "peer": [50.0, 65.0, 45.0]}).render()
    assert "100.0 (90.00-130.0)" in text
    assert "2.00x (2.00-2.00)" in text


def test_prompts_that_a_peer_counts_otherwise_are_told() -> None:
    runs = comparison({"ours": [100.0], "peer": [50.0], "other": [40.0]})
    assert runs.faults == []
    (_, peer, _) = runs.measurements
    assert peer.figures is not None
    peer.figures["total_input_tokens"] = 11
    assert runs.faults == ["round 1, peer, w: counts 11 prompt tokens, ours 10"]


def test_columns_stay_in_line_below_a_long_name() -> None:
    runs = comparison(
        {"ours": [100.0], "a server with a name that is rather long, all told": [9.0]}
    )
    titles, ours, peer, ratio = runs.render().splitlines()[:4]
    assert len(titles) == len(ours) == len(peer) == len(ratio)
