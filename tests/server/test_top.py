"""`octavo top`: figures between two scrapes, and the screen."""

import io

import httpx
import pytest
from click.testing import CliRunner
from rich.console import Console
from served_app import ServeApp

from octavo.engine.core.request_output import EngineStats
from octavo.server.lifecycle import Phase
from octavo.server.metrics import ServerMetrics
from octavo.server.top.commands import look, top
from octavo.server.top.samples import Scrape, parse, percentile, rate, ratio
from octavo.server.top.view import ROWS, View, sparkline


def shown(view: View) -> str:
    screen = io.StringIO()
    Console(width=120, file=screen).print(view.render("http://o"))
    return screen.getvalue()


def scrape(moment: float, **values: float) -> Scrape:
    return Scrape(moment, values, {}, "m")


def test_rates_and_ratios_are_of_the_time_between() -> None:
    before, after = scrape(10.0, a=5.0, b=10.0), scrape(12.0, a=11.0, b=20.0, c=4.0)

    assert rate(before, after, ["a", "c"]) == 5.0
    assert ratio(before, after, "a", "b") == 0.6
    assert ratio(before, before, "a", "b") is None
    assert rate(after, before, ["a"]) == 0.0
    assert rate(scrape(1.0, a=9.0), scrape(2.0, a=1.0), ["a"]) == 0.0


@pytest.mark.parametrize(("share", "value"), [(0.5, 0.15), (0.25, 0.1), (0.9, 1.0), (0.05, 0.02)])
def test_percentiles_are_interpolated_between_the_edges(share: float, value: float) -> None:
    infinity = float("inf")
    before = Scrape(0, {}, {"h": {0.1: 10.0, 0.2: 10.0, 1.0: 10.0, infinity: 10.0}}, "")
    # 5 values up to 0.1, 10 up to 0.2, 1 up to 1.0 and 4 beyond.
    after = Scrape(1, {}, {"h": {0.1: 15.0, 0.2: 25.0, 1.0: 26.0, infinity: 30.0}}, "")

    assert percentile(before, after, "h", share) == pytest.approx(value)
    assert percentile(after, after, "h", share) is None
    assert percentile(before, after, "other", share) is None


@pytest.mark.parametrize(
    ("values", "text"),
    [([0, 1, 2, 4], "▁▃▅█"), ([None, 7.0], " █"), ([0.0, None], "▁ "), ([], "")],
)
def test_a_sparkline_goes_from_0_to_the_largest(values: list[float | None], text: str) -> None:
    assert sparkline(values) == text


def test_every_row_is_computed_from_metrics_that_exist() -> None:
    metrics = ServerMetrics()
    metrics.attach_engine("m", {}, lambda: EngineStats(prefix_cache_queries=metrics.queries))
    metrics.queries = 0
    begin = parse(metrics.render().decode(), 0.0)
    metrics.queries = 5
    metrics.observe_prefill(3, 0)
    metrics.observe_tokens(1, 0.01)
    metrics.observe_first_token(0.5)
    metrics._queue.labels("m", "0").observe(0.1)
    end = parse(metrics.render().decode(), 1.0)

    assert [row.title for row in ROWS if row.compute(begin, end) is None] == []
    assert end.model_name == "m"


async def test_the_screen_follows_a_running_server(serve_app: ServeApp) -> None:
    view = View()
    async with serve_app([65]) as served:
        await served.wait_for(Phase.READY)
        for moment in range(3):
            text = (await served.client.get("/metrics")).text
            view.add(parse(text, float(moment)))
            body = {"prompt": "abc", "max_tokens": 50, "temperature": 0}
            await served.client.post("/v1/completions", json=body)

    lines = {line[:18].strip(): line[18:] for line in shown(view).splitlines()}
    assert "50.0" in lines["generated tokens/s"] and "██" in lines["generated tokens/s"]
    assert "1.0" in lines["requests/s"]
    assert "ms" in lines["first token p50"]


def test_a_server_that_is_gone_is_shown_and_asked_again() -> None:
    answers = iter([httpx.Response(401), httpx.ConnectError("no"), httpx.Response(200, text="")])

    def answer(request: httpx.Request) -> httpx.Response:
        result = next(answers)
        if isinstance(result, Exception):
            raise result
        return result

    view = View()
    screens = []
    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://o") as client:
        for _ in range(3):
            look(client, view)
            screens.append(shown(view))

    assert "HTTP 401: the key is missing or wrong" in screens[0]
    assert "no answer: ConnectError" in screens[1]
    assert "ready" in screens[2]


def test_the_command_ends_after_so_many_looks() -> None:
    result = CliRunner().invoke(top, ["--url", "http://127.0.0.1:9", "--count", "1"])

    assert result.exit_code == 0
    assert "no answer" in result.output and "generated tokens/s" in result.output
    assert result.output.endswith("\n")
