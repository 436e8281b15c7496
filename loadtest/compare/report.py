"""From the runs of a comparison to medians, ratios and a page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import median
from typing import Any

from octavo.loadtest.compare.rounds import Measurement
from octavo.loadtest.compare.scenario import Scenario
from octavo.loadtest.plot.svg import Axis, Chart, page, short_number, table


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
_CELL_WIDTH = 22
_HEADROOM = 1.25  # axis above the highest bar, whose value stands there


class Comparison:
    """All runs of a scenario. A figure's ratio is above 1 where the first server is better."""

    def __init__(self, scenario: Scenario, measurements: Sequence[Measurement]) -> None:
        self._servers = [server.name for server in scenario.servers]
        self._workloads = [workload.name for workload in scenario.workloads]
        self.measurements = measurements
        self._values: Mapping[tuple[str, str, int], dict[str, Any]] = {
            (item.server, item.workload, item.round): item.figures
            for item in measurements
            if item.figures is not None
        }
        self._rounds = range(scenario.rounds)

    @property
    def faults(self) -> list[str]:
        """What speaks against single runs, in words; among it prompts that are counted otherwise.

        All servers get the same texts, so another count means another tokenizer or added tokens.
        """
        found = []
        for item in self.measurements:
            found += [f"{item.name}: {fault}" for fault in item.faults]
            first = self._values.get((self._servers[0], item.workload, item.round))
            if item.figures is None or first is None or item.faults:
                continue
            tokens, theirs = first["total_input_tokens"], item.figures["total_input_tokens"]
            if tokens != theirs:
                found.append(
                    f"{item.name}: counts {theirs} prompt tokens, {self._servers[0]} {tokens}"
                )
        return found

    @property
    def failed(self) -> list[Measurement]:
        """Runs that gave no figures."""
        return [item for item in self.measurements if item.figures is None]

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
        titles = [figure.title for figure in FIGURES]
        rows: list[tuple[str, list[str]]] = []
        for workload in self._workloads:
            rows.append((workload, titles))
            rows += [
                (f"  {server}", [_spread(self.values(server, workload, f), "") for f in FIGURES])
                for server in self._servers
            ]
            rows += [
                (
                    f"  {first} against {peer}",
                    [_spread(self.ratios(peer, workload, f), "x") for f in FIGURES],
                )
                for peer in self._servers[1:]
            ]
            rows.append(("", []))
        width = max(len(name) for name, _ in rows)
        lines = [
            f"{name:<{width}}{''.join(f'{cell:>{_CELL_WIDTH}}' for cell in cells)}"
            for name, cells in rows
        ]
        return "\n".join([*lines, self._explanation, *self.faults])

    @property
    def _explanation(self) -> str:
        return (
            f"Medians of {len(self._rounds)} rounds (lowest to highest). "
            f"A ratio (x) above 1 means that {self._servers[0]} is better."
        )

    def to_json(self) -> dict[str, Any]:
        """Every run with all its figures, and the median ratios."""
        return {
            "servers": self._servers,
            "workloads": self._workloads,
            "runs": [asdict(item) for item in self.measurements],
            "faults": self.faults,
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
        workloads = "".join(f"<li>{escape(name)}</li>" for name in self._workloads)
        faults = "".join(f"<li>{escape(fault)}</li>" for fault in self.faults)
        return page(
            "Comparison of servers",
            f"<p>Workloads:</p><ol>{workloads}</ol><p>{escape(self._explanation)}</p>"
            f'<ul>{faults}</ul><div class="charts">{charts}</div>{tables}',
        )

    def _table(self, figure: Figure) -> str:
        rows = [
            [
                f"{number}. {workload}",
                *(_spread(self.values(name, workload, figure), "", "\n") for name in self._servers),
                *(
                    _spread(self.ratios(name, workload, figure), "x", "\n")
                    for name in self._servers[1:]
                ),
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
            Axis("workload", 0, len(self._workloads)),
            Axis.over("", [max(values.values(), default=1.0) * _HEADROOM]),
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


def _spread(values: Sequence[float], sign: str, between: str = " ") -> str:
    """Median and, of several values, the lowest and the highest after `between`."""
    if not values:
        return "-"
    text = f"{short_number(median(values))}{sign}"
    return (
        f"{text}{between}({short_number(min(values))}-{short_number(max(values))})"
        if len(values) > 1
        else text
    )
