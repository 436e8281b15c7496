"""The scenarios in small, against one server that runs as a process of its own."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.loadtest.cli import bench
from octavo.loadtest.resilience.connections import ConnectionsSize, connections
from octavo.loadtest.resilience.fuzz import FuzzSize, damaged_request, fuzz
from octavo.loadtest.resilience.outcome import Outcome, percentile
from octavo.loadtest.resilience.overload import OverloadSize, overload
from octavo.loadtest.resilience.process import ServerProcess
from octavo.loadtest.resilience.restart import RestartSize, restart
from octavo.loadtest.resilience.soak import SoakSize, soak
from octavo.loadtest.resilience.stop import StopSize, sigterm

CONNECTIONS = ConnectionsSize(idle=60, streams=10, max_tokens=60, reuse=240)
SCENARIOS: dict[str, Callable[[ServerProcess], Awaitable[Outcome]]] = {
    "overload": lambda s: overload(s, OverloadSize(calibrate_s=1, seconds=1.5, max_tokens=8)),
    "soak": lambda s: soak(s, SoakSize(seconds=3, max_tokens=12)),
    "connections": lambda s: connections(s, CONNECTIONS),
    "fuzz": lambda s: fuzz(s, FuzzSize(bad=300, warm_up_tokens=0)),
    "restart": lambda s: restart(s, RestartSize(clients=4, seconds=0)),
    "sigterm": lambda s: sigterm(s, StopSize(clients=12, seconds=0)),
}


@pytest.fixture(scope="module")
def process(random_llama_dir: Path) -> Iterator[ServerProcess]:
    limits = ("--max-num-seqs", "8", "--max-num-queued-reqs", "8")
    memory = ("--kv-cache-memory-bytes", str(2**24))
    server = ServerProcess((str(random_llama_dir), *limits, *memory), keep_socket=True)
    yield server
    server.close()
    server.log.unlink()


@pytest.fixture
def server(process: ServerProcess) -> ServerProcess:
    if not process.is_running:
        process.start()
        asyncio.run(process.wait_until_ready())
    return process


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_server_survives(server: ServerProcess, name: str) -> None:
    outcome = asyncio.run(SCENARIOS[name](server))

    assert not [check for check in outcome.failed if not check.only_long], outcome.render()


def test_each_scenario_is_a_command() -> None:
    listed = CliRunner().invoke(bench, ["resilience", "--help"]).output
    assert all(name in listed for name in SCENARIOS)
    for name in SCENARIOS:
        result = CliRunner().invoke(bench, ["resilience", name, "--help"])
        assert result.exit_code == 0 and "SERVE FLAGS" in result.output


def test_an_unmet_demand_fails_the_scenario() -> None:
    outcome = Outcome("some")
    outcome.none("good", 0)
    outcome.at_least("bad", 1, 2)
    outcome.equal("slow", 1, 2)

    assert [check.name for check in outcome.failed] == ["bad", "slow"]
    assert outcome.to_json()["passed"] is False
    assert "bad   1 (wanted >= 2) NOT MET" in outcome.render()


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.99, 4), (0.0, 1)])
def test_percentiles_are_values_that_occurred(share: float, value: float) -> None:
    assert percentile([4, 2, 3, 1], share) == value


def test_damage_is_the_same_for_the_same_seed_and_differs_otherwise() -> None:
    one, two = random.Random(1), random.Random(1)
    first = [damaged_request(one) for _ in range(200)]

    assert first == [damaged_request(two) for _ in range(200)]
    assert len(set(first)) > 150
