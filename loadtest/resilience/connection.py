"""A bare HTTP/1.1 client: it can be rude, slow and wrong, and sees every byte."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

HOST = "127.0.0.1"
_SMALL_BUFFER = 4096


class ConnectionLost(Exception):
    """The server closed or reset the connection before its answer was complete."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status line and headers; the names are in lower case."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:  # noqa: ANN401 - any JSON value
        """The body's value."""
        return orjson.loads(self.body)

    @property
    def is_whole_stream(self) -> bool:
        """True for a stream of events that ended as it should."""
        return self.body.endswith(b"data: [DONE]\n\n")


def request_bytes(
    path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """A whole request: GET without a body, POST with one. Bytes are sent as they are."""
    content = b""
    if body is not None:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {HOST}"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


class Connection:
    """One TCP connection. Every method raises ConnectionLost when the server ends it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, small_buffer: bool = False) -> Self:
        """Connect; with `small_buffer` little is received that is not read."""
        raw = socket.socket()
        raw.setblocking(False)
        if small_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        try:
            await asyncio.get_running_loop().sock_connect(raw, (HOST, port))
        except OSError as error:
            raw.close()
            raise ConnectionLost(f"not accepted: {error}") from error
        limit = _SMALL_BUFFER if small_buffer else 2**20
        return cls(*await asyncio.open_connection(sock=raw, limit=limit))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def end(self) -> None:
        """Tell the server that nothing more will be sent."""
        if self._writer.can_write_eof() and not self._writer.is_closing():
            self._writer.write_eof()

    def abort(self) -> None:
        """Go away at once."""
        self._writer.transport.abort()

    async def read_head(self) -> Head:
        """Read up to the empty line."""
        try:
            raw = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ConnectionLost("no answer") from error
        status_line, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        pairs = [line.partition(":") for line in lines]
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        return Head(int(status_line.split()[1]), headers)

    async def read_piece(self, head: Head) -> bytes:
        """Read the next chunk of a chunked body; empty at its end."""
        try:
            size = int((await self._reader.readline()).strip(), 16)
            data = await self._reader.readexactly(size + 2)
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise ConnectionLost(f"the answer {head.status} was cut") from error
        return data[:-2]

    async def read_reply(self) -> Reply:
        """Read a whole answer."""
        head = await self.read_head()
        if head.headers.get("transfer-encoding") == "chunked":
            pieces = []
            while piece := await self.read_piece(head):
                pieces.append(piece)
            return Reply(head.status, head.headers, b"".join(pieces))
        try:
            body = await self._reader.readexactly(int(head.headers.get("content-length", "0")))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ConnectionLost(f"the answer {head.status} was cut") from error
        return Reply(head.status, head.headers, body)

    async def ask(self, path: str, body: object = None, **headers: str) -> Reply:
        """Send one request and read its answer; the connection can be used again."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await self.send(request_bytes(path, body, named))
        return await self.read_reply()


async def ask(port: int, path: str, body: object = None, **headers: str) -> Reply:
    """Ask one thing on a connection of its own."""
    async with await Connection.open(port) as connection:
        return await connection.ask(path, body, **headers)
