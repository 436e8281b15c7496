"""Sweeps, fresh prompts, and the page of charts."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from scripted_server import Answer, Asked, json_answer, serve, stream_answer

from octavo.loadtest.cli import bench
from octavo.loadtest.plot.svg import Axis


def answer(asked: Asked) -> Answer:
    chunks = [{"choices": [{"index": 0, "text": "x"}]} for _ in range(asked.body["max_tokens"])]
    usage = {"prompt_tokens": 4, "completion_tokens": asked.body["max_tokens"]}
    return stream_answer(*chunks, {"choices": [], "usage": usage})


ROUTES = {
    "/v1/models": json_answer({"data": [{"id": "served <b>"}]}),
    "/tokenize": json_answer({"tokens": list(range(50))}),
    "/v1/completions": answer,
}


def prompts_of(*arguments: str) -> list[str]:
    with serve(**ROUTES) as server:
        command = ["serve", "--base-url", server.url, "--num-prompts", "3", "--output-len", "2"]
        result = CliRunner().invoke(bench, [*command, *arguments])
        assert result.exit_code == 0, result.output
    return sorted(json.dumps(body["prompt"]) for body in server.bodies("/v1/completions"))


def test_no_prompt_comes_again_in_the_next_run() -> None:
    assert not set(prompts_of()) & set(prompts_of())


def test_a_seed_repeats_a_run() -> None:
    assert prompts_of("--seed", "5") == prompts_of("--seed", "5")


def test_the_seed_that_was_drawn_is_told_and_repeats_the_run() -> None:
    with serve(**ROUTES) as server:
        command = ["serve", "--base-url", server.url, "--num-prompts", "3", "--output-len", "2"]
        result = CliRunner().invoke(bench, command)
    (seed,) = re.findall(r"--seed (\d+)", result.stderr)
    first = sorted(json.dumps(body["prompt"]) for body in server.bodies("/v1/completions"))
    assert prompts_of("--seed", seed) == first


def test_a_sweep_has_fresh_prompts_and_a_file_for_each_value(tmp_path: Path) -> None:
    folder = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    prompts = prompts_of("--concurrency-sweep", "1,2", *folder)
    assert len(set(prompts)) == 6
    saved = {path.name: json.loads(path.read_bytes()) for path in tmp_path.iterdir()}
    assert {name: value["max_concurrency"] for name, value in saved.items()} == {
        "r-concurrency1.json": 1,
        "r-concurrency2.json": 2,
    }


def test_text_prompts_are_words_where_ids_would_do() -> None:
    prompts = [json.loads(text) for text in prompts_of("--text-prompts", "--input-len", "6")]
    assert all(len(prompt.split()) == 6 for prompt in prompts)


class _Page(HTMLParser):
    """Charts by title with the number of their curves and dots; fails on loose ends."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.charts: dict[str, list[str]] = {}
        self.marks: list[str] = []
        self.open: list[str] = []
        self.in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("polyline", "circle"):
            self.marks.append(tag)
        if tag == "svg":
            self.marks = []
        self.in_title = given.get("class") == "title"
        for name in ("x", "y", "cx", "cy", "x1", "y1"):
            float(given.get(name) or 0)

    def handle_data(self, data: str) -> None:
        if self.in_title:
            self.charts[data] = self.marks
            self.in_title = False


def test_the_page_of_a_sweep_has_all_charts(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    prompts_of("--concurrency-sweep", "1,2,3", "--plot", str(path))
    text = path.read_text()
    charts = _Page(text).charts
    for name in ("Time to First Token", "Inter-token Latency", "End-to-end Latency"):
        assert charts[f"{name}: distribution"].count("polyline") == 3
    assert charts["Throughput and TPOT"].count("circle") == 6  # median and P99
    assert "served &lt;b&gt;" in text
    assert "http://" not in text.replace(text[text.find("<p>") : text.find("</p>")], "")


def test_the_page_of_one_run_has_no_curve(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    prompts_of("--plot", str(path))
    assert "Output throughput" in (charts := _Page(path.read_text()).charts)
    assert not [title for title in charts if title.startswith("Throughput and")]


@pytest.mark.parametrize("high", [1.04, 1.7, 4, 7.9, 8.1, 60, 900, 1e5])
@pytest.mark.parametrize("low", [0.021, 1.0, 20.9, 2870.0])
def test_a_logarithmic_axis_has_some_ticks_within_its_range(low: float, high: float) -> None:
    axis = Axis("", low, low * high, log=True)
    assert 2 <= len(axis.ticks()) <= 9
    assert all(low <= tick <= low * high * (1 + 1e-9) for tick in axis.ticks())
