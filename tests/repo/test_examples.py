"""Files that operators copy: they must fit the program as it is."""

import configparser
import http.server
import importlib.resources
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from octavo.config.flags import all_flags, settings_from_file
from octavo.config.server import ServerConfig
from octavo.engine.core.request_output import EngineStats
from octavo.server.auth import OPEN_PATHS
from octavo.server.metrics import ServerMetrics

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "config" / "examples"
SHUTDOWN_S = ServerConfig().shutdown_timeout


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """Label names of every sample that a server shows once each metric has been used."""
    metrics = ServerMetrics()
    metrics.attach_engine("m", {"block_size": "16", "num_gpu_blocks": "1"}, EngineStats)
    metrics.observe_http("/v1/completions", "POST", 200, 0.1)
    # Histograms show no buckets before their first value.
    for histogram in vars(metrics).values():
        if type(histogram).__name__ == "Histogram" and "model_name" in histogram._labelnames:
            histogram.labels("m", "0").observe(1)
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def queries() -> Iterator[tuple[str, str]]:
    dashboard = json.loads((EXAMPLES / "grafana" / "octavo.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for group in documents("alerts.yaml")[0]["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_queries_name_metrics_and_labels_that_exist(
    title: str, query: str, samples: dict[str, set[str]]
) -> None:
    names = re.findall(r"(?:octavo:|http_)[a-z0-9_]+", query)
    if title != "OctavoDown":
        assert names
    labels = set().union(*(samples[name] for name in names), {"job"} if not names else set())
    used = re.findall(r"([a-z_]+)=~?\"", query)
    for group in re.findall(r"by \(([^)]*)\)", query):
        used += [label.strip() for label in group.split(",")]
    assert set(used) <= labels
    assert query.count("(") == query.count(")")


@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_queries_are_promql(title: str, query: str) -> None:
    promql_parser.parse(query.replace("$__rate_interval", "5m"))


def test_panels_neither_overlap_nor_share_ids() -> None:
    panels = json.loads((EXAMPLES / "grafana" / "octavo.json").read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}

    assert len(places) == len({panel["id"] for panel in panels}) == len(panels) > 10


def test_the_settings_file_holds_known_settings() -> None:
    settings = settings_from_file(EXAMPLES / "octavo.yaml")

    assert settings and set(settings) <= set(all_flags())


def test_compose_fits_the_schema_of_compose() -> None:
    schemas = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text(encoding="utf-8"))

    jsonschema.validate(documents("compose.yaml")[0], schema)


def test_the_manifest_fits_the_schemas_of_kubernetes() -> None:
    for document in documents("kubernetes.yaml"):
        kubernetes_validate.validate(document, "1.34", strict=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd's tools")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    kinds = {".service", ".socket", ".timer"}
    units = [tmp_path / path.name for path in EXAMPLES.iterdir() if path.suffix in kinds]
    for unit in units:
        text = (EXAMPLES / unit.name).read_text()
        unit.write_text(text.replace("/opt/octavo/bin/octavo", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, units)],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert len(units) == 4
    assert (done.returncode, done.stderr) == (0, "")


class Health(http.server.BaseHTTPRequestHandler):
    status = ""

    def do_GET(self) -> None:
        assert self.path == "/health"
        self.send_response(200 if self.status == "ready" else 503)
        self.end_headers()
        self.wfile.write(json.dumps({"status": self.status}, separators=(",", ":")).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def health_port() -> Iterator[int]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("status", ["ready", "starting", "draining", "failed"])
def test_compose_ends_a_server_that_has_failed(
    health_port: int, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(Health, "status", status)
    killed = []
    monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
    [*_, code] = documents("compose.yaml")[0]["services"]["octavo"]["healthcheck"]["test"]
    unhealthy = False
    try:
        exec(code.replace("8000", str(health_port)), {})
    except HTTPError as error:
        error.close()
        unhealthy = True

    assert unhealthy == (status != "ready")
    assert killed == ([(1, signal.SIGTERM)] if status == "failed" else [])


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("status", ["ready", "starting", "draining", "failed"])
def test_the_timer_restarts_a_server_that_has_failed(
    health_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(Health, "status", status)
    systemctl = tmp_path / "systemctl"
    systemctl.write_text('#!/bin/sh\necho "$@"\n')
    systemctl.chmod(0o755)
    unit = (EXAMPLES / "octavo-restart.service").read_text().replace("8000", str(health_port))
    [script] = re.findall(r"ExecStart=/bin/sh -c '(.*)'", unit)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True
    )

    assert done.stdout == ("restart octavo.service\n" if status == "failed" else "")


def test_compose_mounts_files_that_exist_and_outlasts_the_drain() -> None:
    [compose] = documents("compose.yaml")
    services = compose["services"]
    octavo = services["octavo"]
    assert set(services) == {"octavo", "prometheus", "grafana"}
    assert octavo["read_only"] and octavo["cap_drop"] == ["ALL"]
    assert int(octavo["stop_grace_period"].removesuffix("s")) > SHUTDOWN_S
    made_by_the_operator = {"./keys", "./octavo-key"}
    mounts = [volume.split(":")[0] for s in services.values() for volume in s["volumes"]]
    files = {mount for mount in mounts if mount.startswith("./")} - made_by_the_operator
    assert not [name for name in files if not (EXAMPLES / name).is_file()]
    assert {m for m in mounts if not m.startswith("./")} <= set(compose["volumes"])


def test_prometheus_and_grafana_find_each_other_where_compose_puts_them() -> None:
    services = documents("compose.yaml")[0]["services"]
    mounts = {
        volume.split(":")[1] for service in services.values() for volume in service["volumes"]
    }
    [prometheus] = documents("prometheus.yaml")
    [job] = prometheus["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    service, port = target.split(":")
    assert (job["job_name"], service) == ("octavo", "octavo")
    assert services[service]["ports"] == [f"{port}:{port}"]
    assert job["authorization"]["credentials_file"] in mounts
    assert {f"/etc/prometheus/{name}" for name in prometheus["rule_files"]} <= mounts

    [source] = documents("grafana/datasource.yaml")[0]["datasources"]
    dashboard = json.loads((EXAMPLES / "grafana" / "octavo.json").read_text())
    used = {panel["datasource"]["uid"] for panel in dashboard["panels"]}
    assert used == {source["uid"]}
    assert source["url"].startswith("http://prometheus:")
    [provider] = documents("grafana/dashboards.yaml")[0]["providers"]
    assert f"{provider['options']['path']}/octavo.json" in mounts


def test_kubernetes_probes_ask_open_routes_and_pods_may_drain() -> None:
    kinds = {document["kind"]: document for document in documents("kubernetes.yaml")}
    assert set(kinds) == {"Deployment", "Service", "PodDisruptionBudget"}
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {probe["httpGet"]["path"] for probe in probes.values()} <= OPEN_PATHS
    # A drain answers 503: it must be over before the liveness probe gives up.
    liveness = probes["liveness"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > SHUTDOWN_S
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + SHUTDOWN_S
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    flags = {arg for arg in container["args"] if arg.startswith("--")}
    assert flags <= {flag.option for flag in all_flags().values()}
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"] == labels
    assert kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels


def test_the_unit_reloads_drains_and_restarts() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(EXAMPLES / "octavo.service")
    service = unit["Service"]

    assert "octavo serve --config" in service["ExecStart"]
    assert "-HUP" in service["ExecReload"]
    assert service["Restart"] == "on-failure"
    assert int(service["TimeoutStopSec"]) > SHUTDOWN_S
    assert unit["Unit"]["Requires"] == "octavo.socket"
    assert (EXAMPLES / "octavo.socket").is_file()


def test_the_image_runs_without_rights_and_keeps_its_files_in_the_cache() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()

    assert [line for line in lines if line.startswith("USER ")] == ["USER octavo"]
    assert "VOLUME /cache" in lines
    # Where compiled kernels go when their sources cannot be written.
    assert any(line.startswith("ENV HOME=/cache") for line in lines)
    assert "HOME=/var/cache/octavo" in (EXAMPLES / "octavo.service").read_text()


def test_the_optional_parts_are_installed_for_tests() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert "octavo[otel]" in extras["dev"]


def test_the_example_starts_as_far_as_its_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:secret-of-alice\n")
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("octavo")),
            *("serve", "--config", str(EXAMPLES / "octavo.yaml")),
            *("--api-key-file", str(keys), "--print-config"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    shown = yaml.safe_load(done.stdout)
    assert (shown["log-format"], shown["api-key-file"]) == ("json", str(keys))
