"""Where answers are rendered: short ones at once, long lists of log-probabilities in a thread."""

import asyncio
from collections.abc import Callable

LARGE = 256
"""Tokens with log-probabilities from which on rendering would hold up all other requests."""


async def render(work: Callable[[], bytes], num_records: int) -> bytes:
    """Return what `work` returns, which renders `num_records` tokens with log-probabilities."""
    return work() if num_records < LARGE else await asyncio.to_thread(work)
