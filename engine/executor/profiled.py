"""An executor around another one that can record its next steps."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import profile

from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.executor.base import Executor

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
    """Runs all steps through `inner`, some of them under torch's profiler."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._wanted: Recording | None = None
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
        """Forget the wish; a profiler that runs already is stopped with the next step."""
        with self._lock:
            self._wanted = None

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        """Carry out one step of the inner executor."""
        wanted = self._wanted
        if wanted is None and self._profiler is None:
            return self._inner.execute_model(plan)
        if wanted is not None and self._profiler is None:
            self._steps_left = wanted.num_steps
            self._profiler = profile()
            self._profiler.start()
        try:
            return self._inner.execute_model(plan)
        finally:
            self._steps_left -= 1
            if wanted is None or self._steps_left == 0:
                self._stop(wanted)

    def shutdown(self) -> None:
        """Release what the inner executor holds."""
        self._inner.shutdown()

    def _stop(self, wanted: Recording | None) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if wanted is None:
            return
        error = None
        try:
            profiler.export_chrome_trace(str(wanted.path))
        except OSError as failure:
            _logger.warning("The trace could not be written: %s", failure)
            error = f"the trace could not be written: {failure.strerror}"
        self.cancel()
        wanted.done(error)
