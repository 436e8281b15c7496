"""The phases and what each of them answers."""

import pytest

from octavo.engine.core.errors import EngineDeadError, NotReadyError
from octavo.server.lifecycle import Lifecycle, Phase


def test_a_start_is_followed_by_ready() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(NotReadyError) as caught:
        lifecycle.check()
    lifecycle.mark_ready()
    lifecycle.check()

    assert (caught.value.code, caught.value.retry_after > 0) == ("server_starting", True)
    assert lifecycle.exit_code == 0


def test_a_drain_refuses_and_is_not_undone_by_a_late_load() -> None:
    lifecycle = Lifecycle()
    lifecycle.mark_draining()
    lifecycle.mark_ready()

    with pytest.raises(NotReadyError) as caught:
        lifecycle.check()
    assert caught.value.code == "server_draining"
    assert lifecycle.exit_code == 0


def test_a_failure_is_final_and_keeps_the_first_reason() -> None:
    lifecycle = Lifecycle()
    lifecycle.mark_ready()
    lifecycle.mark_failed("first")
    lifecycle.mark_failed("second")
    lifecycle.mark_draining()

    with pytest.raises(EngineDeadError):
        lifecycle.check()
    assert (lifecycle.phase, lifecycle.failure) == (Phase.FAILED, "first")
    assert lifecycle.exit_code == 1


@pytest.mark.parametrize("end", ["ready", "draining", "failed"])
async def test_waiting_for_the_start_ends_however_it_ends(end: str) -> None:
    lifecycle = Lifecycle()
    {
        "ready": lifecycle.mark_ready,
        "draining": lifecycle.mark_draining,
        "failed": lambda: lifecycle.mark_failed("x"),
    }[end]()

    assert await lifecycle.wait_until_started() == end


def test_progress_within_a_stage_does_not_begin_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lifecycle = Lifecycle()
    lifecycle.report_progress("downloading the model: 1 of 9 MB")
    now = 107.0
    lifecycle.report_progress("downloading the model: 8 of 9 MB")
    downloading = lifecycle.progress
    lifecycle.report_progress("loading")

    assert downloading == "downloading the model: 8 of 9 MB (7 s)"
    assert lifecycle.progress == "loading (0 s)"


def test_a_long_start_is_asked_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lifecycle = Lifecycle()
    waits = []
    for moment in (100.0, 125.0, 900.0):
        now = moment
        with pytest.raises(NotReadyError) as caught:
            lifecycle.check()
        waits.append(caught.value.retry_after)
        assert lifecycle.retry_after == waits[-1]

    assert waits == [20, 25, 60]
