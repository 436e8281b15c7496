"""The order of a comparison: in each round every server gets every workload."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from octavo.loadtest.client import ServerError
from octavo.loadtest.compare.processes import pinned, running
from octavo.loadtest.compare.scenario import Scenario, Server, Workload
from octavo.loadtest.serving import measure

_SEEDS_PER_ROUND = 1000


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run: figures as in the result file of `bench serve`, or why there are none."""

    server: str
    workload: str
    round: int
    figures: dict[str, Any] | None
    error: str = ""
    off_length: int = 0  # answers with more or fewer tokens than asked for

    @property
    def name(self) -> str:
        """Which run this is."""
        return f"round {self.round + 1}, {self.server}, {self.workload}"

    @property
    def faults(self) -> list[str]:
        """Why its figures are missing or say less than those of other runs."""
        if self.figures is None:
            return [self.error]
        faults = []
        if failed := self.figures["failed"]:
            faults.append(f"{failed} requests failed")
        if self.off_length:
            faults.append(f"{self.off_length} answers are not as long as asked for")
        return faults

    @property
    def line(self) -> str:
        """What is told while a comparison runs."""
        parts = self.faults
        if self.figures is not None:
            parts = [
                f"{self.figures['output_throughput']:.1f} tokens/s",
                f"TTFT {self.figures['median_ttft_ms']:.1f} ms",
                f"TPOT {self.figures['median_tpot_ms']:.2f} ms",
                f"{self.figures['duration']:.1f} s",
                *parts,
            ]
        return f"{self.name}: {', '.join(parts)}"


def run_rounds(
    scenario: Scenario, seed: int, logs: Path, on_measurement: Callable[[Measurement], None]
) -> list[Measurement]:
    """Run everything. Servers run one at a time; who begins changes from round to round.

    In a round all servers get the same prompts, which no other round has. What a server writes
    goes to a file in `logs`.
    """
    found = []
    for number in range(scenario.rounds):
        shift = number % len(scenario.servers)
        for server in scenario.servers[shift:] + scenario.servers[:shift]:
            for measurement in _run_server(scenario, server, number, seed, logs):
                found.append(measurement)
                on_measurement(measurement)
    return found


def _run_server(
    scenario: Scenario, server: Server, number: int, seed: int, logs: Path
) -> Iterator[Measurement]:
    log = logs / f"{server.name.replace('/', '_')}-round{number + 1}.log"
    waiting = list(scenario.workloads)
    try:
        with running(scenario, server, log) as url, pinned(scenario.client_cores):
            for index, workload in enumerate(scenario.workloads):
                own = seed + number * _SEEDS_PER_ROUND + index
                measurement = _run_workload(scenario, server, workload, (url, number, own))
                waiting.remove(workload)
                yield measurement
    except ServerError as error:
        for workload in waiting:
            yield Measurement(server.name, workload.name, number, None, str(error))


def _run_workload(
    scenario: Scenario, server: Server, workload: Workload, place: tuple[str, int, int]
) -> Measurement:
    url, number, seed = place
    options = scenario.options(server, workload)
    options["base_url"] = url
    try:
        (report,) = asyncio.run(measure(options, seed, lambda _: None))
    except (ServerError, ValueError, httpx.InvalidURL) as error:
        return Measurement(server.name, workload.name, number, None, str(error))
    if not report.completed:
        error_text = f"every request failed: {report.errors[0]}"
        return Measurement(server.name, workload.name, number, None, error_text)
    return Measurement(
        server.name, workload.name, number, report.to_json(), off_length=report.off_length
    )
