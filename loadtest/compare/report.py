"""From the runs of a comparison to medians, ratios and a page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from octavo.loadtest.compare.rounds import Measurement
from octavo.loadtest.compare.scenario import Scenario
from octavo.loadtest.plot.svg import Axis, Chart, page, table


@dataclass(frozen=True, slots=True)
class Figure:
    """A key of the result files; `rate` says that more is better."""

    key: str
    title: str
    rate: bool


FIGURES = (
    Figure("output_throughput", "output tok/s", rate=True),
    Figure("median_ttft_ms", "TTFT ms", rate=False),
    Figure("median_tpot_ms", "TPOT ms", rate=False),
    Figure("p99_itl_ms", "P99 ITL ms", rate=False),
)
_NAME_WIDTH = 34
_CELL_WIDTH = 22


class Comparison:
    """All runs of a scenario. A figure's ratio is above 1 where the first server is better."""

    def __init__(self, scenario: Scenario, measurements: Sequence[Measurement]) -> None:
        self._servers = [server.name for server in scenario.servers]
        self._workloads = [workload.name for workload in scenario.workloads]
        self._measurements = measurements
        self._values: Mapping[tuple[str, str, int], dict[str, Any]] = {
            (item.server, item.workload, item.round): item.figures
            for item in measurements
            if item.figures is not None
        }
        self._rounds = range(scenario.rounds)

    @property
    def failed(self) -> list[Measurement]:
        """Runs that gave no figures."""
        return [item for item in self._measurements if item.figures is None]

    def values(self, server: str, workload: str, figure: Figure) -> list[float]:
        """The figure in each round that gave it."""
        return [
            self._values[key][figure.key]
            for number in self._rounds
            if (key := (server, workload, number)) in self._values
        ]

    def ratios(self, peer: str, workload: str, figure: Figure) -> list[float]:
        """First server against `peer` in each round that has both; above 1 is better."""
        ratios = []
        for number in self._rounds:
            ours = self._values.get((self._servers[0], workload, number))
            theirs = self._values.get((peer, workload, number))
            if ours is None or theirs is None:
                continue
            pair = (ours[figure.key], theirs[figure.key])
            better, worse = pair if figure.rate else pair[::-1]
            if worse > 0:
                ratios.append(better / worse)
        return ratios

    def render(self) -> str:
        """The printed tables: medians with lowest and highest, then the ratios."""
        first = self._servers[0]
        titles = "".join(f"{figure.title:>{_CELL_WIDTH}}" for figure in FIGURES)
        lines = []
        for workload in self._workloads:
            lines.append(f"{workload:<{_NAME_WIDTH}}{titles}")
            lines += [
                self._line(
                    server, [self.values(server, workload, figure) for figure in FIGURES], ""
                )
                for server in self._servers
            ]
            lines += [
                self._line(
                    f"{first} against {peer}",
                    [self.ratios(peer, workload, figure) for figure in FIGURES],
                    "x",
                )
                for peer in self._servers[1:]
            ]
            lines.append("")
        lines.append(
            f"Medians of {len(self._rounds)} rounds (lowest to highest). "
            f"A ratio (x) above 1 means that {first} is better."
        )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Every run with all its figures, and the median ratios."""
        return {
            "servers": self._servers,
            "workloads": self._workloads,
            "runs": [asdict(item) for item in self._measurements],
            "ratios": {
                workload: {
                    peer: {
                        figure.key: median(ratios)
                        for figure in FIGURES
                        if (ratios := self.ratios(peer, workload, figure))
                    }
                    for peer in self._servers[1:]
                }
                for workload in self._workloads
            },
        }

    def page(self) -> str:
        """The tables and charts as HTML."""
        charts = "".join(self._bars(figure) for figure in FIGURES)
        charts += "".join(self._ratio_bars(figure) for figure in FIGURES * (len(self._servers) > 1))
        tables = "".join(f"<h2>{figure.title}</h2>{self._table(figure)}" for figure in FIGURES)
        return page("Comparison of servers", f'<div class="charts">{charts}</div>{tables}')

    def _line(self, name: str, columns: Sequence[Sequence[float]], sign: str) -> str:
        cells = "".join(f"{_spread(values, sign):>{_CELL_WIDTH}}" for values in columns)
        return f"  {name:<{_NAME_WIDTH - 2}}{cells}"

    def _table(self, figure: Figure) -> str:
        rows = [
            [
                f"{number}. {workload}",
                *(_spread(self.values(name, workload, figure), "") for name in self._servers),
                *(_spread(self.ratios(name, workload, figure), "x") for name in self._servers[1:]),
            ]
            for number, workload in enumerate(self._workloads, start=1)
        ]
        against = [f"{self._servers[0]} against {peer}" for peer in self._servers[1:]]
        return table(["", *self._servers, *against], rows)

    def _bars(self, figure: Figure) -> str:
        values = {
            (server, workload): median(found)
            for server in self._servers
            for workload in self._workloads
            if (found := self.values(server, workload, figure))
        }
        better = "more is better" if figure.rate else "less is better"
        return self._chart(f"{figure.title} ({better})", self._servers, values, 0)

    def _ratio_bars(self, figure: Figure) -> str:
        peers = self._servers[1:]
        values = {
            (peer, workload): median(found)
            for peer in peers
            for workload in self._workloads
            if (found := self.ratios(peer, workload, figure))
        }
        title = f"{figure.title}: {self._servers[0]} against the others (above 1 is better)"
        return self._chart(title, peers, values, 1)

    def _chart(
        self,
        title: str,
        servers: Sequence[str],
        values: Mapping[tuple[str, str], float],
        first_colour: int,
    ) -> str:
        """Bars in groups, a group for each workload."""
        chart = Chart(
            title,
            Axis("", 0, len(self._workloads)),
            Axis.over("", [*values.values(), 1.0 if first_colour else 0.0]),
        )
        width = 0.8 / len(servers)
        for number, server in enumerate(servers):
            chart.legend(server, number + first_colour)
            for group, workload in enumerate(self._workloads):
                if (value := values.get((server, workload))) is not None:
                    left = group + 0.1 + number * width
                    chart.bar(
                        (left, left + width * 0.92),
                        value,
                        number + first_colour,
                        f"{server}, {workload}: {value:,.4g}",
                    )
        for group, workload in enumerate(self._workloads):
            chart.name_below(group + 0.5, str(group + 1), workload)
        if first_colour:
            chart.level(1.0)
        return chart.render()


def _spread(values: Sequence[float], sign: str) -> str:
    """Median and, of several values, the lowest and the highest."""
    if not values:
        return "-"
    text = f"{_short(median(values))}{sign}"
    return f"{text} ({_short(min(values))}-{_short(max(values))})" if len(values) > 1 else text


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
