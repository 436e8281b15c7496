"""What everything around the model costs: HTTP, templates, text and JSON, per streamed token.

A server without a model (`octavo serve --load-format null`) gets one processor core, and this
client another. Many streams then run as fast as that core lets them, which gives the throughput.
With `--null-step-ms` its steps end when the clock that both share shows a multiple of the step
time. What the clock shows beyond a multiple when a token arrives is the latency added to it. A
token arrives when the kernel has it for this client: what the client does with 32 tokens at once is
no time of the server's.
"""

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import orjson

from octavo.loadtest.client import ServerError

_START_S = 300
_CHUNK = 1 << 16
_SO_TIMESTAMPNS = 35  # of Linux; Python has no name for it
_NOTE_BYTES = 64
_PROMPT = "Tell me a story about a lighthouse."


@dataclass(slots=True)
class Overhead:
    """One round; times in seconds. `server_cpu` counts all threads of the server."""

    num_tokens: int
    duration: float = 0.0
    server_cpu: float = 0.0
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between two arrivals of a stream
    arrivals: list[float] = field(default_factory=list)  # of events, monotonic clock

    def render(self) -> str:
        """One line of figures."""
        median, p99 = np.percentile(self.gaps, (50, 99)) * 1000
        return (
            f"{self.num_tokens / self.duration:,.0f} tokens/s, "
            f"{self.num_tokens / self.server_cpu:,.0f} per second of the server's processor time "
            f"({self.server_cpu / self.num_tokens * 1e6:.0f} us/token); gap between events "
            f"{median:.2f} ms median, {p99:.2f} ms P99; first token "
            f"{np.median(self.ttfts) * 1000:.1f} ms median"
        )

    def render_added(self, step: float, num_steps: int) -> str:
        """One line on a round whose steps ended at multiples of `step` seconds.

        A latency above the step time counts as less, but then the server loses pace.
        """
        added = np.mod(self.arrivals, step) * 1000
        median, p99 = np.percentile(added, (50, 99))
        rate = self.num_tokens / num_steps / step
        return (
            f"added latency at {rate:,.0f} tokens/s in steps of {step * 1000:g} ms: "
            f"{median:.2f} ms median, {p99:.2f} ms P99, {added.max():.2f} ms at most; "
            f"pace kept to {num_steps * step / self.duration:.1%}"
        )


@contextmanager
def null_server(serve_args: Sequence[str], core: int) -> Iterator[tuple[int, int]]:
    """Start `octavo serve --load-format null` on one core; gives its port and process id.

    Raises:
        ServerError: it ended or did not become ready in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    octavo = str(Path(sys.executable).with_name("octavo"))
    process = subprocess.Popen(
        [octavo, "serve", "--load-format", "null", "--port", str(port), *serve_args],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        os.sched_setaffinity(process.pid, {core})
        _wait_until_ready(port, process)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            if process.poll() is not None:
                break
        time.sleep(0.2)
    raise ServerError("the server without a model did not start; try it by hand")


def request_bytes(path: str, num_tokens: int) -> bytes:
    """The whole HTTP request of one stream."""
    body: dict[str, object] = {"max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    if path.endswith("/chat/completions"):
        body["messages"] = [{"role": "user", "content": _PROMPT}]
    else:
        body["prompt"] = _PROMPT
    content = orjson.dumps(body | {"stream_options": {"include_usage": True}})
    return (
        b"POST %b HTTP/1.1\r\nHost: octavo\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % (path.encode(), len(content))
    ) + content


def measure(port: int, pid: int, path: str, num_streams: int, num_tokens: int) -> Overhead:
    """Run one round of streams side by side.

    The client reads with bare system calls: an HTTP library would take more time per event than
    the server does, and would be what is measured.

    Raises:
        ServerError: a stream gave no event.
    """
    result = Overhead(num_streams * num_tokens)
    request = request_bytes(path, num_tokens)
    streams: dict[int, socket.socket] = {}
    poll = select.epoll()
    cpu, begin = _cpu_seconds(pid), time.monotonic()
    wall_clock = time.time() - time.monotonic()
    for _ in range(num_streams):
        stream = socket.create_connection(("127.0.0.1", port))
        stream.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        stream.sendall(request)
        streams[stream.fileno()] = stream
        poll.register(stream, select.EPOLLIN)
    last: dict[int, float] = {}
    while streams:
        ready = poll.poll()
        polled = time.monotonic()
        for descriptor, _ in ready:
            data, notes, _, _ = streams[descriptor].recvmsg(_CHUNK, _NOTE_BYTES)
            now = _arrival(notes, wall_clock) or polled
            if not data:
                poll.unregister(descriptor)
                streams.pop(descriptor).close()
            elif b"data: " in data:
                if descriptor not in last:
                    result.ttfts.append(now - begin)
                elif len(streams) == len(last) == num_streams:
                    result.gaps.append(now - last[descriptor])
                last[descriptor] = now
                result.arrivals.append(now)
    result.duration = time.monotonic() - begin
    result.server_cpu = _cpu_seconds(pid) - cpu
    poll.close()
    if len(last) < num_streams or not result.gaps:
        raise ServerError("a stream of the server without a model gave no events")
    return result


def _arrival(notes: Sequence[tuple[int, int, bytes]], wall_clock: float) -> float | None:
    """When the kernel got the last bytes of a read, on the monotonic clock; None if it says not."""
    for level, kind, value in notes:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = struct.unpack("qq", value)
            return float(seconds - wall_clock + nanoseconds * 1e-9)
    return None


def _cpu_seconds(pid: int) -> float:
    # User and system time, the 14th and 15th field; the second one may hold spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
