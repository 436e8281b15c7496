"""Asking the engine for a profiler trace, from the event loop."""

import asyncio
import contextlib
import functools
import tempfile
from pathlib import Path

from octavo.engine.core.errors import InvalidRequestError, RequestFailedError, RequestTimeoutError
from octavo.engine.executor.profiled import ProfiledExecutor, Recording


class Profiler:
    """Writes traces into the system's folder for temporary files."""

    def __init__(self, executor: ProfiledExecutor) -> None:
        self._executor = executor

    async def record(self, num_steps: int, timeout: float) -> Path:
        """Return the file with a trace of the next `num_steps` steps.

        Raises InvalidRequestError while another is recorded, and RequestTimeoutError when the
        engine does not run so many steps within `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[str | None] = loop.create_future()

        def tell(error: str | None) -> None:
            if not finished.done():
                finished.set_result(error)

        def done(error: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(functools.partial(tell, error))

        path = Path(tempfile.mkdtemp(prefix="octavo-profile-")) / "trace.json"
        if not self._executor.record(Recording(path, num_steps, done)):
            path.parent.rmdir()
            raise InvalidRequestError("Another trace is being recorded")
        try:
            async with asyncio.timeout(timeout):
                error = await finished
        except TimeoutError:
            raise RequestTimeoutError("The engine did not run that many steps in time") from None
        finally:
            if not finished.done() or finished.cancelled():
                self._executor.cancel()
        if error is not None:
            raise RequestFailedError(error)
        return path
