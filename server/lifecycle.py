"""Where the server stands: starting, ready, draining or failed."""

import asyncio
import time
from enum import StrEnum

from octavo.engine.core.errors import EngineDeadError, NotReadyError

# Clients that try twice more, as OpenAI's library does, get past a start that is no longer.
_STARTING_RETRY_S = 20
_LONGEST_RETRY_S = 60
_DRAINING_RETRY_S = 10


class Phase(StrEnum):
    """The phases that the health routes show."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Lifecycle:
    """The server's phase. Used on the event loop thread only.

    FAILED is final: a server that failed may be stopped, but its exit code stays 1.
    """

    def __init__(self) -> None:
        self._phase = Phase.STARTING
        self._failure: str | None = None
        self._started = asyncio.Event()
        self._progress = "loading the model"
        self._begin = self._progress_since = time.monotonic()

    async def wait_until_started(self) -> Phase:
        """Wait for the end of the start, good or bad; returns the phase then."""
        await self._started.wait()
        return self._phase

    @property
    def phase(self) -> Phase:
        """The phase now."""
        return self._phase

    @property
    def progress(self) -> str:
        """What the start is doing, and for how long."""
        return f"{self._progress} ({time.monotonic() - self._progress_since:.0f} s)"

    @property
    def retry_after(self) -> int | None:
        """Seconds after which to ask again; None where that would change nothing."""
        if self._phase is Phase.STARTING:
            # Nobody knows how long a start takes: the longer it has, the longer it may still.
            elapsed = int(time.monotonic() - self._begin)
            return min(max(elapsed, _STARTING_RETRY_S), _LONGEST_RETRY_S)
        return _DRAINING_RETRY_S if self._phase is Phase.DRAINING else None

    def report_progress(self, stage: str) -> None:
        """Note what the start is doing; what follows a colon tells how far that has come."""
        if stage.partition(":")[0] != self._progress.partition(":")[0]:
            self._progress_since = time.monotonic()
        self._progress = stage

    @property
    def failure(self) -> str | None:
        """Why the server failed, for logs."""
        return self._failure

    @property
    def exit_code(self) -> int:
        """What the process answers with when it is stopped now."""
        return 1 if self._phase is Phase.FAILED else 0

    def mark_ready(self) -> None:
        """The model answers; does nothing when the server is already stopping or failed."""
        if self._phase is Phase.STARTING:
            self._phase = Phase.READY
            self._started.set()

    def mark_draining(self) -> None:
        """New requests are refused from now on; those accepted go on."""
        if self._phase is not Phase.FAILED:
            self._phase = Phase.DRAINING
            self._started.set()

    def mark_failed(self, reason: str) -> None:
        """The engine is gone for good. The first reason is kept."""
        if self._phase is not Phase.FAILED:
            self._phase = Phase.FAILED
            self._failure = reason
            self._started.set()

    def check(self) -> None:
        """Raise NotReadyError or EngineDeadError unless requests are served."""
        if self._phase is Phase.STARTING:
            raise NotReadyError(
                f"The server is starting: {self.progress}",
                "server_starting",
                self.retry_after or _STARTING_RETRY_S,
            )
        if self._phase is Phase.DRAINING:
            raise NotReadyError("The server is shutting down", "server_draining", _DRAINING_RETRY_S)
        if self._phase is Phase.FAILED:
            raise EngineDeadError("The engine has failed and serves no more requests")
