"""The engine's thread and the event loop share one interpreter; this makes them take turns."""

import asyncio
import threading

_LONGEST_WAIT_S = 0.02
_LONGEST_WAIT_FOR_BACKLOG_S = 1.0
_NUM_TURNS = 4
"""Rounds of the event loop from the outputs of a step to the last byte of them."""


class Handoff:
    """Lets the engine begin a step once the event loop has sent out the one before.

    Only one of them can hold the interpreter anyhow. Without turns an engine with short steps
    hardly ever lets go of it: the event loop loses it at every system call and waits for it until
    the interpreter forces a switch, which takes milliseconds, while outputs pile up. And where a
    step computes on all processors, an event loop that works beside it takes one of them from a
    thread for which the others then wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free = threading.Event()
        self._free.set()

    def give(self) -> None:
        """Give the turn to the event loop, in the engine's thread, before the outputs."""
        self._free.clear()

    def wait(self, has_backlog: bool = False) -> None:
        """Wait for the turn, in the engine's thread; no longer than a short while.

        With a backlog the engine waits longer: running further ahead would only let memory and the
        delay of every stream grow.
        """
        self._free.wait(_LONGEST_WAIT_FOR_BACKLOG_S if has_backlog else _LONGEST_WAIT_S)

    def release(self, turns: int = _NUM_TURNS) -> None:
        """Give the turn back, on the event loop, once what is ready now has run."""
        if turns > 0:
            self._loop.call_soon(self.release, turns - 1)
        else:
            self._free.set()
