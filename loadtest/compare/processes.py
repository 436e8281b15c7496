"""Starting one server on given cores, waiting until it serves, and stopping it."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from octavo.loadtest.client import ServerError
from octavo.loadtest.compare.scenario import Scenario, Server

_POLL_SECONDS = 0.25
_LOG_LINES = 5


@contextmanager
def running(scenario: Scenario, server: Server, log: Path) -> Iterator[str]:
    """The base URL of `server`, which is started and stopped unless it runs already.

    Raises ServerError when it cannot be started, ends, or does not become ready in time.
    """
    if server.base_url is not None:
        yield server.base_url
        return
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    words = server.arguments(scenario.variables, port)
    with log.open("wb") as output:
        process = _start(words, scenario.server_cores, output.fileno())
        try:
            _wait_until_ready(server, url, process, log)
            yield url
        finally:
            _stop(process, server.stop_timeout)


@contextmanager
def stopped_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that a server that runs meanwhile is stopped too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_cores(scenario: Scenario) -> None:
    """Refuse cores that `pinned` could not use later. Raises ServerError."""
    cores = set(scenario.client_cores)
    if any(server.command is not None for server in scenario.servers):
        cores |= set(scenario.server_cores)
    _check_usable(cores, os.sched_getaffinity(0))


def _check_usable(cores: Collection[int], usable: Collection[int]) -> None:
    if missing := set(cores) - set(usable):
        known = ", ".join(map(str, sorted(usable)))
        raise ServerError(
            f"core {min(missing)} is not among those this process may use, which are {known}"
        )


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Run this process, and what it starts meanwhile, on `cores`; on an empty list as before."""
    before = os.sched_getaffinity(0)
    _check_usable(cores, before)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _start(words: Sequence[str], cores: Sequence[int], output: int) -> subprocess.Popen[bytes]:
    with pinned(cores):
        try:
            # A session of its own: what the server starts is stopped with it, and nothing else.
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"{words[0]} cannot be started: {error}") from error


def _wait_until_ready(
    server: Server, url: str, process: subprocess.Popen[bytes], log: Path
) -> None:
    deadline = time.monotonic() + server.start_timeout
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            raise ServerError(f"{server.name} ended with code {code}: {_tail(log)}")
        with suppress(httpx.TransportError):
            if httpx.get(url + server.ready, timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(_POLL_SECONDS)
    raise ServerError(f"{server.name} was not ready after {server.start_timeout:g} s: {_tail(log)}")


def _stop(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Ask the server to end, then end what is left of its session."""
    process.terminate()
    deadline = time.monotonic() + timeout
    while process.returncode is None and time.monotonic() < deadline:
        # Not waited for yet: until then its number, which is its session's too, is not given anew.
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(_POLL_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return " | ".join(lines[-_LOG_LINES:]) or "it wrote nothing"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
