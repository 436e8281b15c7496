"""Short turns of the event loop's thread."""

import platform
import re
import threading
from pathlib import Path

import pytest

from octavo.server import turns


def _slice_ns() -> int | None:
    """The calling thread's turn as the system tells it, where it does."""
    try:
        table = Path(f"/proc/self/task/{threading.get_native_id()}/sched").read_text()
    except OSError:
        return None
    found = [line.split(":")[1] for line in table.splitlines() if line.startswith("se.slice")]
    return int(found[0]) if found else None


def _gives_turns() -> bool:
    """Whether this is Linux 6.12 or later, where the call may not be without effect."""
    numbers = re.match(r"(\d+)\.(\d+)", platform.release())
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (6, 12)


def test_turns_are_short_in_the_calling_thread_only() -> None:
    seen: dict[str, int | None] = {}

    def child() -> None:
        seen["child"] = _slice_ns()

    def caller() -> None:
        seen["before"] = _slice_ns()
        if turns.take_short_turns():
            seen["after"] = _slice_ns()
            thread = threading.Thread(target=child)
            thread.start()
            thread.join()

    # Never in the thread of the tests.
    thread = threading.Thread(target=caller)
    thread.start()
    thread.join()
    if seen["before"] is None or not _gives_turns():
        pytest.skip("this system gives no turns of a length that was asked for, or does not tell")
    assert seen["after"] == 100_000
    assert seen["child"] == seen["before"]


def test_other_systems_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.platform, "machine", lambda: "riscv64")
    assert not turns.take_short_turns()
