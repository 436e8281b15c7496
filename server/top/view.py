"""The screen of `octavo top`."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from octavo.server.top.samples import Scrape, percentile, rate, ratio

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 60


@dataclass(frozen=True, slots=True)
class Row:
    """One line: what it is called, how it is computed from two scrapes, how it is written."""

    title: str
    compute: Callable[[Scrape, Scrape], float | None]
    write: Callable[[float], str]


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _milliseconds(value: float) -> str:
    return f"{1000 * value:,.1f} ms"


def _gauge(name: str) -> Callable[[Scrape, Scrape], float | None]:
    return lambda before, after: after.values.get(name)


def _rate(*names: str) -> Callable[[Scrape, Scrape], float | None]:
    return lambda before, after: rate(before, after, names)


def _percentile(name: str, share: float) -> Callable[[Scrape, Scrape], float | None]:
    return lambda before, after: percentile(before, after, name, share)


ROWS: Sequence[Row] = (
    Row("generated tokens/s", _rate("generation_tokens_total"), _number),
    Row("prompt tokens/s", _rate("prompt_tokens_total"), _number),
    Row("requests/s", _rate("request_success_total"), _number),
    Row("refused/s", _rate("requests_rejected_total"), _number),
    Row("running", _gauge("num_requests_running"), _number),
    Row("waiting", _gauge("num_requests_waiting"), _number),
    Row("cache in use", _gauge("kv_cache_usage_perc"), _percent),
    Row(
        "prefix hits",
        lambda before, after: ratio(
            before, after, "prefix_cache_hits_total", "prefix_cache_queries_total"
        ),
        _percent,
    ),
    Row("preemptions/s", _rate("num_preemptions_total"), _number),
    Row("first token p50", _percentile("time_to_first_token_seconds", 0.5), _milliseconds),
    Row("first token p99", _percentile("time_to_first_token_seconds", 0.99), _milliseconds),
    Row("next token p50", _percentile("inter_token_latency_seconds", 0.5), _milliseconds),
    Row("next token p99", _percentile("inter_token_latency_seconds", 0.99), _milliseconds),
    Row("queue p99", _percentile("request_queue_time_seconds", 0.99), _milliseconds),
)


def sparkline(values: Sequence[float | None]) -> str:
    """Draw values as bars between 0 and the largest; a gap where there is none."""
    largest = max((value for value in values if value is not None), default=0.0)
    if largest <= 0:
        return "".join(" " if value is None else _BARS[0] for value in values)
    steps = len(_BARS) - 1
    return "".join(
        " " if value is None else _BARS[round(max(value, 0.0) / largest * steps)]
        for value in values
    )


class View:
    """Keeps the last minute of every row."""

    def __init__(self) -> None:
        self._before: Scrape | None = None
        self._history: list[deque[float | None]] = [deque(maxlen=_HISTORY) for _ in ROWS]
        self._status = "waiting for the first metrics"
        self._model_name = ""

    def add(self, scrape: Scrape) -> None:
        """Take in a scrape; the first one only begins the count."""
        if self._before is not None:
            for row, history in zip(ROWS, self._history, strict=True):
                history.append(row.compute(self._before, scrape))
        self._before = scrape
        self._status, self._model_name = "ready", scrape.model_name

    def add_failure(self, reason: str) -> None:
        """Note that there was no answer; the rows get a gap."""
        self._status, self._before = reason, None
        for history in self._history:
            history.append(None)

    def render(self, url: str) -> Group:
        """Return what the terminal shows."""
        head = Text.assemble(
            ("octavo top", "bold"), f"  {url}  {self._model_name}  ", (self._status, "green")
        )
        if self._status != "ready":
            head.stylize("red", len(head) - len(self._status))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan")
        table.add_column(justify="right", min_width=12)
        table.add_column(no_wrap=True, overflow="crop")
        for row, history in zip(ROWS, self._history, strict=True):
            latest = history[-1] if history else None
            table.add_row(
                row.title, "-" if latest is None else row.write(latest), sparkline(history)
            )
        return Group(head, table, Text("Ctrl-C ends", style="dim"))
