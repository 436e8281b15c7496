"""What only a socket shows: keep-alive comments, clients that go away, connections kept open."""

import json
import re
import socket
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from octavo_fixtures import random_table
from octavo_serving import TableSettings, served_on_socket

from octavo.config.server import MIB, ServerConfig
from octavo.server import streaming

COMPLETIONS = "/v1/completions"


class RawClient:
    """One connection that sends a request and reads bytes with the times of their arrival."""

    def __init__(
        self, base_url: str, path: str, *, receive_buffer: int | None = None, **body: Any
    ) -> None:
        host, port = base_url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        self.socket.settimeout(10)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect((host, int(port)))
        content = json.dumps(body).encode()
        self.socket.sendall(
            b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % (path.encode(), host.encode(), len(content)) + content
        )

    def read_until(self, needle: bytes, count: int = 1) -> bytes:
        data = b""
        while data.count(needle) < count:
            received = self.socket.recv(65536)
            assert received, data
            data += received
        return data

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def slow_server(byte_bpe_dir: Path) -> Iterator[str]:
    """One running sequence at a time, whose answer never ends by itself."""
    table = random_table()
    table[:, 128:] = -50  # ASCII only, and no end
    settings = TableSettings(byte_bpe_dir, table, max_num_seqs=1, server={"sse_keep_alive": 0.1})
    with served_on_socket(settings) as base_url:
        settings.executors[0].before_step = lambda step: time.sleep(0.01)
        yield base_url


LONG = {"prompt": "a", "max_tokens": 500, "temperature": 0}
SHORT = {"prompt": "a", "max_tokens": 5, "temperature": 0}


def test_a14_comments_while_a_request_waits(slow_server: str) -> None:
    assert ServerConfig().sse_keep_alive == 15
    with httpx.Client(base_url=slow_server) as client:
        expected = client.post(COMPLETIONS, json=SHORT).json()["choices"][0]["text"]
        first = RawClient(slow_server, COMPLETIONS, **LONG, stream=True)
        first.read_until(b"data: ")
        waiting = RawClient(slow_server, COMPLETIONS, **SHORT, stream=True)
        head = waiting.read_until(b": keep-alive\n\n", 2)
        assert head.startswith(b"HTTP/1.1 200")
        assert b"data: " not in head
        # A request that cannot be served has its real status all the same.
        assert client.post(COMPLETIONS, json=SHORT | {"n": 0, "stream": True}).status_code == 400
        with openai.OpenAI(base_url=f"{slow_server}/v1", api_key="none") as typed:
            stream = typed.completions.create(model="M", **SHORT, stream=True)
            first.close()
            assert "".join(chunk.choices[0].text for chunk in stream) == expected
        rest = waiting.read_until(b"[DONE]\n\n")
        waiting.close()
    lines = [line for line in (head + rest).split(b"\r\n\r\n", 1)[1].split(b"\n") if line.strip()]
    events = [line for line in lines if line.startswith(b"data: ")]
    pieces = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]]
    assert "".join(pieces) == expected
    # Sizes of transfer chunks aside, there is nothing but events and comments.
    sizes = re.compile(rb"[0-9a-f]+\r")
    assert {line for line in lines if line not in events and not sizes.fullmatch(line)} == {
        b": keep-alive"
    }


def gauges(client: httpx.Client) -> tuple[float, float, float]:
    text = client.get("/metrics").text
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = [re.search(rf"^octavo:{name}{{.*}} (.*)$", text, re.MULTILINE) for name in names]
    running, waiting, usage = (float(match[1]) for match in found if match is not None)
    return running, waiting, usage


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_a_client_that_goes_away_frees_everything(
    slow_server: str, path: str, streamed: bool
) -> None:
    body: dict[str, Any] = {**LONG, "stream": streamed, "n": 3}
    if path != COMPLETIONS:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "a"}]
        body["max_tokens"] = 400
    with httpx.Client(base_url=slow_server) as client:
        running = RawClient(slow_server, path, **body)
        queued = RawClient(slow_server, path, **body)
        while gauges(client)[0] == 0 or gauges(client)[1] == 0:
            time.sleep(0.01)
        running.close()
        queued.close()
        deadline = time.monotonic() + 2
        while gauges(client) != (0, 0, 0):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        answer = client.post(COMPLETIONS, json=SHORT)
        assert answer.status_code == 200
        metrics = client.get("/metrics").text
    left = re.findall(r"^octavo:client_disconnects_total{.*} (.*)$", metrics, re.MULTILINE)
    assert sum(map(float, left)) == 2


def test_a_client_that_never_reads_loses_its_place(
    byte_bpe_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "READER_TIMEOUT_S", 0.2)
    table = random_table()
    table[:, 128:] = -50
    settings = TableSettings(byte_bpe_dir, table, max_num_seqs=1, server={"max_num_queued_reqs": 0})
    # The answer is larger than what the sockets of both sides hold.
    body = LONG | {"logprobs": 20}
    create_server = socket.create_server

    def create_small_server(address: tuple[str, int]) -> socket.socket:
        listener = create_server(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(socket, "create_server", create_small_server)
    with served_on_socket(settings) as base_url, httpx.Client(base_url=base_url) as client:
        deaf = RawClient(base_url, COMPLETIONS, receive_buffer=4096, **body, stream=True)
        while gauges(client)[0] == 0:
            time.sleep(0.01)
        deadline = time.monotonic() + 20
        while (answer := client.post(COMPLETIONS, json=SHORT)).status_code == 429:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert answer.status_code == 200
        deaf.close()


def talk(base_url: str, raw: bytes) -> tuple[bytes, bytes]:
    """Send bytes on a new connection; returns head and body of what comes until its end."""
    host, port = base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(raw)
        received = b""
        try:
            while data := connection.recv(65536):
                received += data
        except ConnectionResetError:  # the server did not read all of it
            pass
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (POST + b"Content-Length: abc\r\n\r\n{}", 400),
        (POST + b"Content-Length: -5\r\n\r\n{}", 400),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /v1/\xff\xfe HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"CONNECT /health HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"CONNECT http://a/b HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 400_000, 431),
        (b"GET /" + b"a" * 400_000, 431),
        (b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n", 431),
    ],
)
def test_what_is_no_http_gets_an_error_of_the_same_form(
    slow_server: str, raw: bytes, status: int
) -> None:
    head, body = talk(slow_server, raw)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nx-request-id: " in head
    error = json.loads(body)["error"]
    assert (set(error), error["type"], error["param"]) == (
        {"message", "type", "param", "code"},
        "invalid_request_error",
        None,
    )
    assert httpx.get(f"{slow_server}/health").status_code == 200


@pytest.mark.parametrize("declared", [False, True])
def test_of_100_megabytes_no_more_is_kept_than_the_limit(slow_server: str, declared: bool) -> None:
    size = 100 * MIB
    piece = b" " * MIB
    framing = b"Content-Length: %d" % size if declared else b"Transfer-Encoding: chunked"
    part = piece if declared else b"%x\r\n%b\r\n" % (MIB, piece)
    host, port = slow_server.removeprefix("http://").split(":")
    tracemalloc.start()
    try:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(POST + framing + b"\r\n\r\n")
            for _ in range(100):
                connection.sendall(part)
            if not declared:
                connection.sendall(b"0\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}}"):
                answer += connection.recv(65536)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"request_too_large"' in answer
    most = 0 if declared else ServerConfig().max_body_size
    assert peak < most + 16 * MIB
    assert httpx.post(slow_server + COMPLETIONS, json=SHORT).status_code == 200


@pytest.mark.parametrize("pause", [False, True])
def test_an_offer_of_another_protocol_is_passed_over(slow_server: str, pause: bool) -> None:
    # The HTTP client of Java offers HTTP/2 with each request, its body included.
    content = json.dumps(SHORT).encode()
    offer = (
        b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    )
    head = POST + b"Content-Length: %d\r\n%b\r\n" % (len(content), offer)
    host, port = slow_server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head if pause else head + content)
        if pause:
            time.sleep(0.05)
            connection.sendall(content)
        received = b""
        while data := connection.recv(65536):
            received += data
    answer = json.loads(received.partition(b"\r\n\r\n")[2])
    expected = httpx.post(slow_server + COMPLETIONS, json=SHORT).json()
    assert answer["choices"] == expected["choices"]
