"""The page of `octavo bench serve --plot`."""

from collections.abc import Sequence
from html import escape

import numpy as np

from octavo.loadtest.plot.svg import Axis, Chart, Point, page, table
from octavo.loadtest.report import METRICS, Report

_QUANTILES = np.linspace(0, 100, 201)
_TABLE = {
    "completed": "requests",
    "failed": "failed",
    "request_throughput": "req/s",
    "request_goodput": "good req/s",
    "output_throughput": "output tok/s",
    "total_token_throughput": "total tok/s",
    "median_ttft_ms": "median TTFT ms",
    "p99_ttft_ms": "P99 TTFT ms",
    "median_tpot_ms": "median TPOT ms",
    "p99_tpot_ms": "P99 TPOT ms",
    "median_itl_ms": "median ITL ms",
    "p99_itl_ms": "P99 ITL ms",
}


def run_page(reports: Sequence[Report]) -> str:
    """The page of one run, or of the runs of a sweep."""
    settings = reports[0].settings
    charts = [_throughput_chart(reports), *(_distribution(m, reports) for m in METRICS)]
    if len(reports) > 1:
        charts += [_curve(reports, metric) for metric in ("ttft", "tpot")]
    facts = (
        f"{settings.model_id}, {settings.num_prompts} requests, rate {settings.rate_text} req/s "
        f"(burstiness {settings.burstiness:g}), seed {settings.seed}, {settings.date}"
    )
    return page(
        settings.label or "Serving benchmark",
        f'<p>{escape(facts)}</p>{_figures(reports)}<div class="charts">{"".join(charts)}</div>',
    )


def _name(report: Report) -> str:
    concurrency = report.settings.max_concurrency
    return f"concurrency {concurrency}" if concurrency else "no limit"


def _figures(reports: Sequence[Report]) -> str:
    values = [report.to_json() for report in reports]
    keys = [key for key in _TABLE if any(value.get(key) is not None for value in values)]
    rows = [
        [_name(report), *(f"{value[key]:,.5g}" for key in keys)]
        for report, value in zip(reports, values, strict=True)
    ]
    return table(["run", *(_TABLE[key] for key in keys)], rows)


def _throughput_chart(reports: Sequence[Report]) -> str:
    lines = [report.throughput_over_time() for report in reports]
    points = [point for line in lines for point in line]
    chart = Chart(
        "Output throughput",
        Axis.over("seconds since the start of the run", [x for x, _ in points]),
        Axis.over("tokens in this second", [y for _, y in points]),
    ).ticks_below()
    for number, (report, line) in enumerate(zip(reports, lines, strict=True)):
        chart.line(line, number, _name(report))
    return chart.render()


def _distribution(metric: str, reports: Sequence[Report]) -> str:
    """Which share of all values is at most so many milliseconds."""
    title, short = METRICS[metric]
    values = [value for report in reports for value in report.samples[metric]]
    chart = Chart(
        f"{title}: distribution",
        Axis.over(f"{short} in ms, logarithmic", values, log=True),
        Axis("share of values in %", 0, 100),
    ).ticks_below()
    for number, report in enumerate(reports):
        if samples := report.samples[metric]:
            quantiles = np.percentile(samples, _QUANTILES)
            points = list(zip(quantiles.tolist(), _QUANTILES.tolist(), strict=True))
            chart.line(points, number, _name(report))
    chart.level(50)
    chart.level(99)
    return chart.render()


def _curve(reports: Sequence[Report], metric: str) -> str:
    """Throughput against latency: each value of the sweep is a dot, median and P99 a line."""
    short = METRICS[metric][1]
    values = [report.to_json() for report in reports]
    x = Axis.over("output tokens per second", [value["output_throughput"] for value in values])
    lines: dict[str, list[Point]] = {
        name: [
            (value["output_throughput"], float(np.percentile(report.samples[metric] or [0], share)))
            for report, value in zip(reports, values, strict=True)
        ]
        for name, share in (("Median", 50), ("P99", 99))
    }
    highest = [y for line in lines.values() for _, y in line]
    chart = Chart(f"Throughput and {short}", x, Axis.over(f"{short} in ms", highest)).ticks_below()
    for number, (name, line) in enumerate(lines.items()):
        chart.line(line, number, f"{name} {short}")
        for report, point in zip(reports, line, strict=True):
            tooltip = f"{_name(report)}: {point[0]:,.1f} tokens/s, {name} {point[1]:,.1f} ms"
            label = str(report.settings.max_concurrency or "") if name == "P99" else ""
            chart.point(point, number, label, tooltip)
    return chart.render()
