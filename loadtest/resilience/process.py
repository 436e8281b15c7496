"""A server as a child process, and what the system knows about it; needs Linux."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.loadtest.client import ServerError
from octavo.loadtest.resilience.connection import HOST, ConnectionLost, ask

_START_S = 600
_STOP_S = 60
_LOG_TAIL = 2000
# What systemd does between fork and exec: the socket is descriptor 3, and the process is named.
_HAND_DOWN = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the process holds."""

    rss_mib: float
    num_files: int
    num_threads: int


class ServerProcess:
    """`octavo serve` with some flags. Its log goes into a file that outlives it.

    With `keep_socket` the listening socket belongs to this process and is handed down as systemd
    does it: clients that come while the server is away wait for the next one.
    """

    def __init__(self, serve_args: Sequence[str], keep_socket: bool = False) -> None:
        with socket.create_server((HOST, 0), backlog=2048) as listener:
            self.port: int = listener.getsockname()[1]
            self._listener = listener.dup() if keep_socket else None
        self._command = [str(Path(sys.executable).with_name("octavo")), "serve", *serve_args]
        self._process: subprocess.Popen[bytes] | None = None
        descriptor, name = tempfile.mkstemp(prefix="octavo-resilience-", suffix=".log")
        os.close(descriptor)
        self.log = Path(name)

    @property
    def is_running(self) -> bool:
        """True from its start to its end."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, also again after it has ended."""
        command, inherited = [*self._command, "--port", str(self.port)], []
        if self._listener is not None:
            inherited = [self._listener.fileno()]
            command = [sys.executable, "-c", _HAND_DOWN, str(inherited[0]), *self._command]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, pass_fds=inherited, stdout=subprocess.DEVNULL, stderr=log
            )

    async def wait_until_ready(self) -> None:
        """Wait until it serves. Raises ServerError when it ends or takes too long."""
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ConnectionLost, TimeoutError):
                async with asyncio.timeout(1):
                    if (await ask(self.port, "/health")).status == 200:
                        return
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.1)
        tail = self.log.read_text(errors="replace")[-_LOG_TAIL:]
        raise ServerError(f"the server did not start; the end of its log {self.log}:\n{tail}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Wait for its end and return the exit code."""
        assert self._process is not None
        async with asyncio.timeout(_STOP_S):
            while self._process.poll() is None:
                await asyncio.sleep(0.02)
        return self._process.returncode

    def usage(self) -> Usage:
        """What it holds now."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
        )
        return Usage(
            rss_mib=int(status["VmRSS"].split()[0]) / 1024,
            num_files=len(os.listdir(f"/proc/{self.pid}/fd")),
            num_threads=int(status["Threads"]),
        )

    def log_faults(self) -> list[str]:
        """Lines of the log that tell of an error, and the heads of tracebacks."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if " ERROR " in line or line.startswith("Traceback")]

    def let_go_of_socket(self) -> None:
        """Leave the port to the running server alone: when it ends, clients are refused."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """End it at once if it still runs, and close the port."""
        self.let_go_of_socket()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextlib.asynccontextmanager
async def running(
    serve_args: Sequence[str], keep_socket: bool = False
) -> AsyncIterator[ServerProcess]:
    """A server that is ready. Raises ServerError."""
    server = ServerProcess(serve_args, keep_socket)
    try:
        server.start()
        await server.wait_until_ready()
        yield server
    finally:
        server.close()
