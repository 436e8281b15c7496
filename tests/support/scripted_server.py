"""A small HTTP server that answers by a script and remembers what it was asked.

It runs in a thread and speaks over a real socket, so that clients are tested as they are used.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A status and a body; each part is sent on its own, a number is a pause in seconds."""

    parts: Iterable[bytes | float]
    status: int = 200
    content_type: str = "application/json"


@dataclass(frozen=True)
class Asked:
    """One request as the server saw it; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


Route = Answer | Callable[[Asked], Answer]


@dataclass
class ScriptedServer:
    """Where the server listens, its script, and the requests so far."""

    url: str = ""
    routes: dict[str, Route] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)

    def bodies(self, path: str) -> list[Any]:
        """Bodies of the requests to one path, in order."""
        return [request.body for request in self.asked if request.path == path]


def json_answer(value: object, status: int = 200) -> Answer:
    """A plain JSON answer."""
    return Answer([json.dumps(value).encode()], status)


def error_answer(status: int, message: str, code: str | None = None) -> Answer:
    """An error in the form of OpenAI's API."""
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return json_answer({"error": error}, status)


def stream_answer(*events: object, done: bool = True) -> Answer:
    """An event stream: each event is a JSON value, a float is a pause, bytes are sent as such."""
    parts: list[bytes | float] = []
    for event in events:
        if isinstance(event, bytes | float):
            parts.append(event)
        else:
            text = json.dumps(event, ensure_ascii=False)
            parts.append(f"data: {text}\n\n".encode())
    if done:
        parts.append(b"data: [DONE]\n\n")
    return Answer(parts, content_type="text/event-stream")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: Any) -> None:
        # A client that is gone between two requests is no fault of the test.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*arguments)


@contextmanager
def serve(**routes: Route) -> Iterator[ScriptedServer]:
    """Run a server while the block lasts; routes can be changed through `.routes` at any time."""
    state = ScriptedServer(routes=dict(routes))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = json.loads(raw) if raw else None
            asked = Asked(self.command, self.path, headers, body)
            state.asked.append(asked)
            route = state.routes.get(self.path, error_answer(404, "no such path"))
            answer = route if isinstance(route, Answer) else route(asked)
            try:
                self._send(answer)
            except (BrokenPipeError, ConnectionResetError):
                state.disconnected.set()
                self.close_connection = True

        def _send(self, answer: Answer) -> None:
            self.send_response(answer.status)
            self.send_header("content-type", answer.content_type)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for part in answer.parts:
                if isinstance(part, float):
                    time.sleep(part)
                elif part:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
