"""Sizes of the tiles of attention, and a way to measure other ones than those chosen."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query rows and cached tokens of one step of a program, and how it is compiled."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


_forced: ContextVar[Tiles | None] = ContextVar("forced", default=None)


@contextmanager
def forced_tiles(tiles: Tiles) -> Iterator[None]:
    """Within it attention uses these, whatever the device and the shapes are."""
    token = _forced.set(tiles)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> Tiles | None:
    """The tiles of the `forced_tiles` that surrounds the call, if one does."""
    return _forced.get()
