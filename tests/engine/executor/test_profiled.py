"""A profiler's faults cost the trace, never a step."""

from pathlib import Path

import pytest
import torch

from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.executor.profiled import ProfiledExecutor, Recording


class Steps:
    """An executor that does nothing."""

    num_blocks = 3

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        return ModelOutput({plan.step: (1,)})

    def shutdown(self) -> None:
        pass


class ScriptedProfiler:
    """Stands for torch's; counts its steps' starts and ends, and fails where told."""

    fails_at = ""
    running = 0

    def _do(self, what: str, change: int) -> None:
        type(self).running += change
        if what == self.fails_at:
            raise RuntimeError(f"{what} failed")

    def start(self) -> None:
        self._do("start", 1)

    def stop(self) -> None:
        self._do("stop", -1)

    def export_chrome_trace(self, path: str) -> None:
        self._do("export", 0)


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedProfiler]:
    class Fresh(ScriptedProfiler):
        pass

    monkeypatch.setattr(torch.profiler, "profile", Fresh)
    return Fresh


def step(executor: ProfiledExecutor, number: int = 1) -> ModelOutput:
    return executor.execute_model(SchedulerOutput(number, (), (), (), ()))


@pytest.mark.parametrize("fails_at", ["start", "stop", "export"])
def test_a_profiler_that_fails_harms_no_step(
    profiler: type[ScriptedProfiler], tmp_path: Path, fails_at: str
) -> None:
    profiler.fails_at = fails_at
    results: list[str | None] = []
    executor = ProfiledExecutor(Steps())
    recording = Recording(tmp_path / "trace.json", 1, results.append)

    assert executor.record(recording)
    assert step(executor, 7).sampled == {7: (1,)}
    (error,) = results
    assert error is not None and f"{fails_at} failed" in error

    profiler.fails_at = ""
    assert executor.record(recording)
    step(executor)
    assert results == [error, None]


def test_a_recording_after_a_cancelled_one_has_all_its_steps(
    profiler: type[ScriptedProfiler], tmp_path: Path
) -> None:
    dropped: list[str | None] = []
    results: list[str | None] = []
    executor = ProfiledExecutor(Steps())
    executor.record(Recording(tmp_path / "a.json", 3, dropped.append))
    step(executor)
    executor.cancel()
    executor.record(Recording(tmp_path / "b.json", 3, results.append))

    step(executor)
    step(executor)
    assert (results, profiler.running) == ([], 1)
    step(executor)
    assert (results, dropped, profiler.running) == ([None], [], 0)


def test_a_cancelled_profiler_is_stopped_even_when_that_fails(
    profiler: type[ScriptedProfiler], tmp_path: Path
) -> None:
    executor = ProfiledExecutor(Steps())
    executor.record(Recording(tmp_path / "a.json", 3, [].append))
    step(executor)
    executor.cancel()
    profiler.fails_at = "stop"

    assert step(executor, 4).sampled == {4: (1,)}
    assert profiler.running == 0
