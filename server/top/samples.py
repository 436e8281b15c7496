"""Numbers from two scrapes of /metrics: rates, gauges and percentiles of what lies between."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Buckets = Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One answer of /metrics. Samples of one name are summed over their labels.

    `buckets` maps a histogram's name to its counts by upper edge. `moment` is in seconds.
    """

    moment: float
    values: Mapping[str, float]
    buckets: Mapping[str, Buckets]
    model_name: str


def parse(text: str, moment: float) -> Scrape:
    """Read the text of /metrics; what is not of Octavo is left out."""
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    model_name = ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("octavo:")
            if name == sample.name:
                continue
            model_name = sample.labels.get("model_name", model_name)
            values[name] = values.get(name, 0.0) + sample.value
            if "le" in sample.labels:
                edges = buckets.setdefault(name.removesuffix("_bucket"), {})
                edge = float(sample.labels["le"])
                edges[edge] = edges.get(edge, 0.0) + sample.value
    return Scrape(moment, values, buckets, model_name)


def rate(before: Scrape, after: Scrape, names: Iterable[str]) -> float:
    """Return how fast the sum of some counters grew, per second; 0 after a restart."""
    grown = sum(after.values.get(name, 0.0) - before.values.get(name, 0.0) for name in names)
    seconds = after.moment - before.moment
    return max(grown, 0.0) / seconds if seconds > 0 else 0.0


def ratio(before: Scrape, after: Scrape, part: str, whole: str) -> float | None:
    """Return the share of one counter's growth in another's; None without growth."""
    grown = after.values.get(whole, 0.0) - before.values.get(whole, 0.0)
    if grown <= 0:
        return None
    return (after.values.get(part, 0.0) - before.values.get(part, 0.0)) / grown


def percentile(before: Scrape, after: Scrape, name: str, share: float) -> float | None:
    """Return a percentile of what a histogram took in between; None when that is nothing.

    Between two edges it is interpolated, as Prometheus' histogram_quantile does; above the last
    edge it is that edge.
    """
    earlier = before.buckets.get(name, {})
    counts = [
        (edge, count - earlier.get(edge, 0.0))
        for edge, count in sorted(after.buckets.get(name, {}).items())
    ]
    if not counts or counts[-1][1] <= 0:
        return None
    wanted = share * counts[-1][1]
    low_edge, low_count = 0.0, 0.0
    for edge, count in counts:
        if count >= wanted:
            if math.isinf(edge):
                return low_edge
            inside = (wanted - low_count) / (count - low_count) if count > low_count else 1.0
            return low_edge + (edge - low_edge) * inside
        low_edge, low_count = edge, count
    return low_edge
