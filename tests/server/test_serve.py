"""A run of the server on a real socket: start, signals and exit codes."""

import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import ScriptedExecutor, fake_loader
from fastapi import FastAPI
from octavo_fixtures import byte_ids, token_id

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.core.errors import CheckpointError, ConfigurationError
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.server import listener, serve
from octavo.server.listener import describe, is_open_to_others, local_url, open_listener

HELLO = [*byte_ids("hello"), token_id("<|eos|>")]
ENDLESS = byte_ids("ab" * 300)
TLS = Path(__file__).parent / "tls"
"""Two certificates that sign themselves, with keys that guard nothing."""

BODY = {"prompt": "abc", "max_tokens": 400, "temperature": 0}


class Run:
    """Runs the server in the main thread, as signals need, and `script` in another one.

    The server gets one SIGTERM: from the script by `stop`, or after it.
    """

    def __init__(self, tokenizer_dir: Path, executor: ScriptedExecutor, **config: Any) -> None:
        self.executor = executor
        self.config = ServerConfig(**{"port": 0} | config)
        self._tokenizer_dir = tokenizer_dir
        self._failure: BaseException | None = None
        self._stopped = False

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            os.kill(os.getpid(), signal.SIGTERM)

    def run(
        self, script: Callable[[httpx.Client], None], before: Callable[[], None] = lambda: None
    ) -> int:
        listener = open_listener(self.config)
        url = describe(self.config, listener)

        def work() -> None:
            try:
                with httpx.Client(base_url=url, timeout=20) as client:
                    script(client)
            except BaseException as error:
                self._failure = error
            self.executor.gate.set()
            self.stop()

        thread = threading.Thread(target=work)
        load = fake_loader(self._tokenizer_dir, self.executor, before=before)
        thread.start()
        code = serve.run(self.config, EngineConfig(), listener, load)
        thread.join()
        if self._failure is not None:
            raise self._failure
        return code


def wait_until_ready(client: httpx.Client) -> None:
    while client.get("/health").status_code != 200:
        time.sleep(0.01)


def test_a_run_serves_and_ends_with_code_0(
    byte_bpe_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    texts = []

    def script(client: httpx.Client) -> None:
        wait_until_ready(client)
        texts.append(client.post("/v1/completions", json=BODY).json()["choices"][0]["text"])

    run = Run(byte_bpe_dir, ScriptedExecutor(HELLO), served_model_name=("alias",))

    assert run.run(script) == 0
    assert texts == ["hello"]
    [ready] = [r.getMessage() for r in caplog.records if "is ready on" in r.getMessage()]
    assert "http://127.0.0.1:" in ready and "serving alias (context 512" in ready
    assert "curl http://127.0.0.1:" in ready


def test_the_command_to_try_shows_where_the_key_goes(
    byte_bpe_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = Run(byte_bpe_dir, ScriptedExecutor(HELLO), api_key=("hidden",))

    assert run.run(wait_until_ready) == 0
    [ready] = [r.getMessage() for r in caplog.records if "is ready on" in r.getMessage()]
    assert "/v1/chat/completions -H 'Authorization: Bearer KEY' -H 'Content-Type" in ready
    assert "hidden" not in caplog.text


def test_sigterm_lets_a_stream_end_and_refuses_new_work(byte_bpe_dir: Path) -> None:
    lines: list[str] = []
    refusals: list[str] = []
    executor = ScriptedExecutor(HELLO)
    executor.step_seconds = 0.4
    run = Run(byte_bpe_dir, executor)

    def script(client: httpx.Client) -> None:
        wait_until_ready(client)
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
            received = stream.iter_lines()
            lines.append(next(received))
            run.stop()
            # The port stays open, and says why nothing new is taken.
            while (answer := httpx.get(client.base_url.join("/v1/models"))).status_code == 200:
                time.sleep(0.01)
            refusals.append(answer.json()["error"]["code"])
            lines.extend(received)

    assert run.run(script) == 0
    assert refusals == ["server_draining"]
    assert [line for line in lines if line][-1] == "data: [DONE]"


def test_f08_a_run_whose_engine_died_ends_with_code_1(byte_bpe_dir: Path) -> None:
    executor = ScriptedExecutor(HELLO)
    run = Run(byte_bpe_dir, executor)

    def script(client: httpx.Client) -> None:
        wait_until_ready(client)
        executor.fail_with = ValueError("broken")
        assert client.post("/v1/completions", json=BODY).status_code == 503
        while client.get("/health").json() != {"status": "failed"}:
            time.sleep(0.01)

    assert run.run(script) == 1


def test_a_failed_load_ends_the_run_by_itself_with_code_1(byte_bpe_dir: Path) -> None:
    def fail() -> None:
        raise CheckpointError("model.safetensors: damaged")

    config = ServerConfig(port=0)
    load = fake_loader(byte_bpe_dir, ScriptedExecutor(HELLO), before=fail)

    assert serve.run(config, EngineConfig(), open_listener(config), load) == 1


def test_a_signal_during_the_load_does_not_wait_for_it(byte_bpe_dir: Path) -> None:
    loading = threading.Event()
    run = Run(byte_bpe_dir, ScriptedExecutor(HELLO))

    def script(client: httpx.Client) -> None:
        assert client.get("/health").json()["status"] == "starting"

    try:
        assert run.run(script, before=lambda: assert_waited(loading)) == 0
    finally:
        loading.set()


def test_the_thread_that_loaded_has_ended_when_the_engine_steps(byte_bpe_dir: Path) -> None:
    names: list[str] = []

    class Noting(ScriptedExecutor):
        def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
            names.extend(thread.name for thread in threading.enumerate())
            return super().execute_model(plan)

    def script(client: httpx.Client) -> None:
        wait_until_ready(client)
        assert client.post("/v1/completions", json=BODY).status_code == 200

    assert Run(byte_bpe_dir, Noting(HELLO)).run(script) == 0
    assert "engine" in names and "octavo-loader" not in names


def assert_waited(event: threading.Event) -> None:
    assert event.wait(60)


def test_a_second_signal_ends_at_once(byte_bpe_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    executor = ScriptedExecutor(ENDLESS)
    executor.step_seconds = 0.01
    run = Run(byte_bpe_dir, executor)

    def leave(code: int) -> None:
        codes.append(code)

    def script(client: httpx.Client) -> None:
        wait_until_ready(client)
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
            next(stream.iter_lines())
            run.stop()
            while client.get("/health").json() != {"status": "draining"}:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            while not codes:
                time.sleep(0.01)

    monkeypatch.setattr(serve, "leave", leave)
    run.run(script)

    assert codes == [128 + signal.SIGTERM]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(byte_bpe_dir: Path, stream: bool) -> None:
    executor = ScriptedExecutor(ENDLESS)
    executor.step_seconds = 0.01
    run = Run(byte_bpe_dir, executor)

    def gauge(client: httpx.Client, name: str) -> float:
        text = client.get("/metrics").text
        lines = [x for x in text.splitlines() if x.startswith(f"octavo:{name}{{")]
        assert lines
        return sum(float(line.split()[-1]) for line in lines)

    def script(client: httpx.Client) -> None:
        wait_until_ready(client)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: o\r\nContent-Type: application/json\r\n"
        body = json.dumps(BODY | {"stream": stream}).encode()
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            while gauge(client, "num_requests_running") == 0:
                time.sleep(0.01)
        deadline = time.monotonic() + 2
        while gauge(client, "num_requests_running") + gauge(client, "kv_cache_usage_perc") > 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert gauge(client, "client_disconnects_total") == 1

    assert run.run(script) == 0


def test_sighup_reads_the_keys_again(
    byte_bpe_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys"
    path.write_text("alice:old")
    run = Run(byte_bpe_dir, ScriptedExecutor(HELLO), api_key_file=str(path))

    def status(client: httpx.Client, key: str) -> int:
        return client.get("/version", headers={"Authorization": f"Bearer {key}"}).status_code

    def script(client: httpx.Client) -> None:
        wait_until_ready(client)
        assert (status(client, "old"), status(client, "new")) == (200, 401)
        path.write_text("alice:new\nbob:other")
        os.kill(os.getpid(), signal.SIGHUP)
        while status(client, "new") != 200:
            time.sleep(0.01)
        assert status(client, "old") == 401
        path.unlink()
        os.kill(os.getpid(), signal.SIGHUP)
        while "the keys stay as they were" not in caplog.text:
            time.sleep(0.01)
        assert status(client, "new") == 200

    assert run.run(script) == 0
    assert "valid keys are alice, bob" in caplog.text
    assert "other" not in caplog.text


def test_sighup_takes_a_renewed_certificate(
    byte_bpe_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = tmp_path / "crt", tmp_path / "key"
    old, new = ((TLS / f"{name}.crt").read_text() for name in ("old", "new"))
    old_key, new_key = ((TLS / f"{name}.key").read_text() for name in ("old", "new"))
    certificate.write_text(old)
    key.write_text(old_key)
    run = Run(
        byte_bpe_dir,
        ScriptedExecutor(HELLO),
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
    )

    def script(client: httpx.Client) -> None:
        address = (client.base_url.host, client.base_url.port or 0)
        assert ssl.get_server_certificate(address, timeout=20) == old
        # Between the two writes of a renewal they do not fit together.
        certificate.write_text(new)
        os.kill(os.getpid(), signal.SIGHUP)
        while "the certificate stays as it was" not in caplog.text:
            time.sleep(0.01)
        assert ssl.get_server_certificate(address, timeout=20) == old
        key.write_text(new_key)
        os.kill(os.getpid(), signal.SIGHUP)
        while ssl.get_server_certificate(address, timeout=20) != new:
            time.sleep(0.01)

    assert run.run(script) == 0


@pytest.mark.parametrize("name", [None, "old", "new"])
def test_clients_must_show_a_certificate_of_the_ca(byte_bpe_dir: Path, name: str | None) -> None:
    run = Run(
        byte_bpe_dir,
        ScriptedExecutor(HELLO),
        ssl_certfile=str(TLS / "old.crt"),
        ssl_keyfile=str(TLS / "old.key"),
        ssl_ca_certs=str(TLS / "new.crt"),
    )
    context = ssl.create_default_context(cafile=str(TLS / "old.crt"))
    context.check_hostname = False
    if name is not None:
        context.load_cert_chain(TLS / f"{name}.crt", TLS / f"{name}.key")
    answers: list[int] = []

    def script(client: httpx.Client) -> None:
        url = client.base_url.copy_with(scheme="https")
        # An unknown client learns of its refusal when it reads.
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.Client(base_url=url, verify=context) as shown,
        ):
            answers.append(shown.get("/version").status_code)

    assert run.run(script) == 0
    assert answers == ([200] if name == "new" else [])


def test_g03_idle_connections_outlive_the_pools_of_clients() -> None:
    config = ServerConfig()
    uvicorn_config = serve.make_uvicorn_config(FastAPI(), config)

    assert uvicorn_config.timeout_keep_alive == config.timeout_keep_alive == 120


def test_g03_a_connection_is_used_again_until_its_idle_time_is_over(byte_bpe_dir: Path) -> None:
    run = Run(byte_bpe_dir, ScriptedExecutor(HELLO), timeout_keep_alive=1)
    request = b"GET /version HTTP/1.1\r\nHost: o\r\n\r\n"

    def script(client: httpx.Client) -> None:
        wait_until_ready(client)
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address, timeout=20) as connection:
            for _ in range(2):
                connection.sendall(request)
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            assert connection.recv(65536) == b""

    assert run.run(script) == 0


def test_bad_tls_files_stop_the_start(tmp_path: Path) -> None:
    (tmp_path / "pem").write_text("no certificate")
    path = str(tmp_path / "pem")

    with pytest.raises(ConfigurationError, match="--ssl-certfile"):
        serve.make_uvicorn_config(FastAPI(), ServerConfig(ssl_keyfile=path, ssl_certfile=path))


def test_a_tls_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "pem").write_text("")
    config = ServerConfig(ssl_certfile=str(tmp_path / "pem"), ssl_keyfile=str(tmp_path / "key"))

    with pytest.raises(ConfigurationError, match=r"^--ssl-keyfile: cannot read .*key: No such"):
        serve.make_uvicorn_config(FastAPI(), config)


def test_a_unix_socket_can_be_listened_on(byte_bpe_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "octavo.sock"
    run = Run(byte_bpe_dir, ScriptedExecutor(HELLO), uds=str(path))

    def script(_: httpx.Client) -> None:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://o") as client:
            wait_until_ready(client)

    assert run.run(script) == 0
    assert not path.exists()


def test_g05_a_port_in_use_is_refused_before_anything_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"Port {port} on 127\.0\.0\.1 is in use"):
            open_listener(ServerConfig(port=port))


def test_a_host_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--host: cannot resolve"):
        open_listener(ServerConfig(host="no such host", port=0))


def test_a_unix_socket_left_behind_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "s"))
    open_listener(config).close()
    with open_listener(config), pytest.raises(ConfigurationError, match="it is in use"):
        open_listener(config)


@pytest.mark.parametrize(("host", "open_to_others"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_listening_beyond_loopback_is_noticed(host: str, open_to_others: bool) -> None:
    config = ServerConfig(host=host, port=0)
    with open_listener(config) as opened:
        assert is_open_to_others(opened) is open_to_others


def test_a_socket_that_was_handed_down_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        monkeypatch.setattr(listener, "_FIRST_INHERITED", held.dup().detach())
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        with listener.open_listener(ServerConfig(port=1)) as opened:
            assert describe(ServerConfig(port=1), opened).endswith(f":{held.getsockname()[1]}")
    # Taken once: a child of the server finds nothing.
    assert "LISTEN_FDS" not in os.environ and "LISTEN_PID" not in os.environ


def test_a_socket_for_another_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "1")
    with open_listener(ServerConfig(port=0)) as opened:
        assert opened.fileno() != 3


@pytest.mark.parametrize(("count", "uds"), [("2", None), ("1", "/run/s")])
def test_sockets_that_cannot_be_served_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, count: str, uds: str | None
) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", count)
    with pytest.raises(ConfigurationError, match="handed down"):
        open_listener(ServerConfig(uds=uds))


def test_nothing_slow_is_imported_before_the_port_is_open() -> None:
    slow = "{'torch', 'transformers', 'opentelemetry.sdk', 'opentelemetry.exporter'}"
    code = f"import sys, octavo.server.serve; print(sorted({slow} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "[]\n"


@pytest.mark.parametrize("kind", ["a file", "no server"])
def test_a_descriptor_that_does_not_listen_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with socket.socket() if kind == "no server" else open(os.devnull) as held:
        monkeypatch.setattr(listener, "_FIRST_INHERITED", os.dup(held.fileno()))
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        with pytest.raises(ConfigurationError, match="is no listening socket"):
            open_listener(ServerConfig(port=1))


@pytest.mark.parametrize(
    ("host", "url"), [("0.0.0.0", "http://127.0.0.1:"), ("::", "http://[::1]:")]
)
def test_the_url_to_try_works_on_this_machine(host: str, url: str) -> None:
    config = ServerConfig(host=host, port=0)
    with open_listener(config) as listener:
        assert local_url(config, listener).startswith(url)


_ABORTS_WHEN_FREED = """
import logging, os
from octavo.server.serve import leave

class Lost:
    def __del__(self):
        os.abort()

lost = Lost()
logging.basicConfig(format="%(message)s")
logging.error("The engine has failed: CUDA error")
print("not flushed", end="")
leave(1)
"""


def test_a_device_that_cannot_be_freed_does_not_hide_the_exit_code() -> None:
    command = [sys.executable, "-c", _ABORTS_WHEN_FREED]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "not flushed")
    assert done.stderr == "The engine has failed: CUDA error\n"
