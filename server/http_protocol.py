"""What goes wrong below the application: requests that are no HTTP, or whose head is too large."""

import http
import uuid

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.server.errors import INVALID_REQUEST, ErrorAnswer
from octavo.server.middleware import REQUEST_ID_HEADER

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of the request line and the headers together."""

_LINE_BYTES = 4  # the colon, the space and the end of a header's line
_UPGRADE = b"upgrade"
_MALFORMED = ErrorAnswer(400, "The request is not valid HTTP", INVALID_REQUEST)
_HEAD_TOO_LARGE = ErrorAnswer(
    431,
    f"The request line and the headers are larger than {MAX_HEAD_BYTES} bytes",
    INVALID_REQUEST,
    "headers_too_large",
)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with errors of the API's form and a bound on the head of a request.

    An offer to change to another protocol, such as the HTTP/2 of Java's client, is passed over.
    """

    url = b""
    _head_complete = False
    _head_bytes = 0
    _offers_upgrade = False

    def data_received(self, data: bytes) -> None:
        """Parse what has come, and answer what is no request."""
        self._unset_keepalive_if_required()
        if not self._head_complete:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._pass_over_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(_HEAD_TOO_LARGE if self._is_head_too_large() else _MALFORMED)
        else:
            # Only here are headers seen that never end.
            if not self._head_complete and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        """Begin to read a head."""
        super().on_message_begin()
        self._head_complete = self._offers_upgrade = False

    def on_headers_complete(self) -> None:
        """Begin to answer; the parser hands an error over to `data_received`."""
        self._head_complete = True
        if self._is_head_too_large():
            raise ValueError("the head of the request is too large")
        if self.parser.get_method() == b"CONNECT":
            # The parser takes each one for a change of protocol, with and without an offer.
            raise ValueError("this is no proxy")
        names = {name for name, _ in self.headers}
        self._offers_upgrade = self.parser.should_upgrade() and _UPGRADE in names
        if not self._offers_upgrade:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Wait for the head of the next request."""
        if not self._offers_upgrade:
            super().on_message_complete()
        self._head_complete, self._head_bytes = False, 0

    def _is_head_too_large(self) -> bool:
        lines = sum(len(name) + len(value) + _LINE_BYTES for name, value in self.headers or ())
        return len(self.url) + lines > MAX_HEAD_BYTES

    def _pass_over_upgrade(self, rest: bytes) -> None:
        """Read the request again without its offer: the parser takes none of its body for one."""
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != _UPGRADE]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join((*head, b"\r\n", rest)))

    def _refuse(self, answer: ErrorAnswer) -> None:
        if self.transport.is_closing():
            return
        # An answer that has begun cannot become another one.
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_render(answer))
        self.transport.close()


def _render(answer: ErrorAnswer) -> bytes:
    body = answer.body()
    head = (
        f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}\r\n"
        f"{REQUEST_ID_HEADER}: {uuid.uuid4().hex}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
