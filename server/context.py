"""What is known of the HTTP request that is being answered, wherever its work runs.

A context variable rather than an argument: logs, limits per key and traces would otherwise add the
same parameter to every service between the middlewares and the engine.
"""

import math
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.core.errors import InvalidRequestError
from octavo.server.metrics import RequestSummary

TIMEOUT_HEADER = "x-request-timeout"


@dataclass(slots=True)
class RequestContext:
    """One HTTP request. Used on the event loop thread only.

    `state` is the scope's own, where a route may replace the request id. `timeout_header` is as
    the client sent it. `key_name` is the name of the key that came along, never the key itself.
    `entered` is true once the engine took a prompt of the request; `rejection` is the label of a
    refusal that the status alone does not tell. `summaries` holds the prompts that have ended.
    `given_up` is true once the engine ended a prompt before its time.
    """

    state: MutableMapping[str, Any] = field(default_factory=dict)
    timeout_header: str | None = None
    traceparent: str | None = None
    key_name: str | None = None
    is_admin: bool = False
    entered: bool = False
    rejection: str | None = None
    summaries: list[RequestSummary] = field(default_factory=list)
    given_up: bool = False
    _on_give_up: Callable[[], None] | None = None

    @property
    def request_id(self) -> str:
        """The id that the answer's header carries."""
        request_id: str = self.state.get("request_id", "")
        return request_id

    def give_up(self) -> None:
        """Note that no more work is done for this request."""
        self.given_up = True
        if self._on_give_up is not None:
            self._on_give_up()

    def watch(self, on_give_up: Callable[[], None]) -> None:
        """Call `on_give_up` when the request is given up; now if it has been already."""
        self._on_give_up = on_give_up
        if self.given_up:
            on_give_up()

    @property
    def timeout(self) -> float | None:
        """Seconds that the client gives its request. Raises InvalidRequestError."""
        if self.timeout_header is None:
            return None
        try:
            seconds = float(self.timeout_header)
        except ValueError:
            seconds = 0.0
        if not (math.isfinite(seconds) and seconds > 0):
            raise InvalidRequestError(f"The header {TIMEOUT_HEADER} must be seconds above 0")
        return seconds


_current: ContextVar[RequestContext | None] = ContextVar("octavo_request", default=None)


def enter_request(context: RequestContext) -> None:
    """Make `context` that of the running task and of all tasks begun by it."""
    _current.set(context)


def current_request() -> RequestContext:
    """Return the context of the running task; outside of any request, an empty one."""
    return _current.get() or RequestContext()
