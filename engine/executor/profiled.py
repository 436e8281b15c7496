"""An executor around another one that can record its next steps."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.engine.core.model_output import Launch, ModelOutput, Wait
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.executor.base import Executor

if TYPE_CHECKING:
    from torch.profiler import profile

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Recording:
    """A wish for a trace of the next `num_steps` steps in the file `path`.

    `done` is called from the engine thread with None, or with what went wrong.
    """

    path: Path
    num_steps: int
    done: Callable[[str | None], None]


class ProfiledExecutor:
    """Runs all steps through `inner`, some of them under torch's profiler.

    A profiler that fails costs its trace, never a step.
    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._wanted: Recording | None = None
        # What follows belongs to the engine thread.
        self._current: Recording | None = None
        self._profiler: profile | None = None
        self._steps_left = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache of the inner executor."""
        return self._inner.num_blocks

    def record(self, recording: Recording) -> bool:
        """Record from the next step on; False when a recording is under way. From any thread."""
        with self._lock:
            if self._wanted is not None:
                return False
            self._wanted = recording
            return True

    def cancel(self) -> None:
        """Forget the wish; a profiler that runs already is stopped before the next step."""
        with self._lock:
            self._wanted = None

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        """Carry out one step of the inner executor."""
        return self._recorded(lambda: self._inner.execute_model(plan))

    def around(self, launch: Launch) -> Launch:
        """The same for steps that are launched and waited for later: a step ends with its wait."""

        def launch_recorded(plan: SchedulerOutput) -> Wait:
            wait = launch(plan)
            return lambda: self._recorded(wait)

        return launch_recorded

    def _recorded(self, step: Wait) -> ModelOutput:
        wanted = self._wanted
        if wanted is not self._current:
            self._drop()
            if wanted is not None:
                self._begin(wanted)
        if self._current is None:
            return step()
        try:
            return step()
        finally:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._finish(self._current)

    def shutdown(self) -> None:
        """Release what the inner executor holds."""
        self._inner.shutdown()

    def _begin(self, recording: Recording) -> None:
        # The server imports this module before it can answer anybody; torch takes seconds.
        from torch.profiler import profile  # noqa: PLC0415

        try:
            profiler = profile()
            profiler.start()
        except Exception as failure:  # torch's profiler, which may not be built for the device
            _logger.exception("The profiler could not be started")
            self._answer(recording, f"the profiler could not be started: {failure}")
            return
        self._current, self._profiler, self._steps_left = recording, profiler, recording.num_steps

    def _finish(self, recording: Recording) -> None:
        error = None
        try:
            profiler = self._stop()
            profiler.export_chrome_trace(str(recording.path))
        except OSError as failure:
            _logger.warning("The trace could not be written: %s", failure)
            error = f"the trace could not be written: {failure.strerror}"
        except Exception as failure:
            _logger.exception("The profiler failed")
            error = f"the profiler failed: {failure}"
        self._answer(recording, error)

    def _drop(self) -> None:
        """Stop a profiler whose recording nobody waits for any more."""
        if self._current is None:
            return
        try:
            self._stop()
        except Exception:
            _logger.exception("The profiler failed")

    def _stop(self) -> "profile":
        assert self._profiler is not None
        profiler, self._profiler, self._current = self._profiler, None, None
        profiler.stop()
        return profiler

    def _answer(self, recording: Recording, error: str | None) -> None:
        with self._lock:
            if self._wanted is recording:
                self._wanted = None
        recording.done(error)
