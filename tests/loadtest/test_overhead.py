"""The measurement of all that is not the model, against a server of a few lines."""

import os
import socket
import struct
import threading
from collections.abc import Iterator

import orjson
import pytest

from octavo.loadtest.client import ServerError
from octavo.loadtest.overhead import Overhead, _arrival, measure, request_bytes


@pytest.fixture(params=[3, 0])
def scripted(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A server that answers two connections with that many events; gives port and number."""
    number: int = request.param

    def serve(listener: socket.socket) -> None:
        connections = [listener.accept()[0] for _ in range(2)]
        for connection in connections:
            while b"include_usage" not in connection.recv(65536):
                pass
        for _ in range(number):
            for connection in connections:
                connection.sendall(b"data: {}\n\n")
            arrived.wait(0.05)
        for connection in connections:
            connection.close()

    arrived = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield listener.getsockname()[1], number
        thread.join()


def test_streams_are_read_to_their_end(scripted: tuple[int, int]) -> None:
    port, number = scripted
    if number == 0:
        with pytest.raises(ServerError):
            measure(port, os.getpid(), "/v1/completions", 2, 10)
        return
    result = measure(port, os.getpid(), "/v1/completions", 2, 10)
    assert result.num_tokens == 20
    assert len(result.ttfts) == 2
    assert 1 <= len(result.gaps) <= 4
    assert result.duration > sum(result.gaps[:1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_request_is_whole(path: str) -> None:
    head, _, content = request_bytes(path, 7).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(content)}".encode() in head
    body = orjson.loads(content)
    assert (body["max_tokens"], body["stream"]) == (7, True)
    assert ("messages" in body) == path.endswith("chat/completions")


def test_added_latency_is_what_the_clock_shows_beyond_a_step() -> None:
    result = Overhead(num_tokens=40, duration=0.25, arrivals=[0.021, 0.042, 0.063, 0.084])
    line = result.render_added(step=0.02, num_steps=10)
    assert "at 200 tokens/s in steps of 20 ms: 2.50 ms median" in line
    assert "3.97 ms P99, 4.00 ms at most" in line
    assert "pace kept to 80.0%" in line


def test_a_token_arrives_when_the_kernel_has_it() -> None:
    note = struct.pack("qq", 1000, 500_000_000)
    kernel = (socket.SOL_SOCKET, 35, note)
    other = (socket.SOL_SOCKET, 1, note)
    assert _arrival([other, kernel], wall_clock=900.0) == 100.5
    assert _arrival([other], wall_clock=900.0) is None
