"""What one API key may use, so that one client cannot take the whole server."""

import math
from collections import defaultdict, deque
from collections.abc import Callable

from octavo.engine.core.errors import KeyLimitError

_MINUTE_S = 60.0
_RETRY_AFTER_S = 1


class KeyLimits:
    """Counts prompts by the name of the key. Used on the event loop thread only.

    `max_concurrency` bounds those accepted and unfinished, `rpm` those accepted within any 60
    seconds; None is no limit. `clock` gives seconds.
    """

    def __init__(
        self, max_concurrency: int | None, rpm: int | None, clock: Callable[[], float]
    ) -> None:
        self._max_concurrency = max_concurrency
        self._rpm = rpm
        self._clock = clock
        self._open: defaultdict[str, int] = defaultdict(int)
        self._accepted: defaultdict[str, deque[float]] = defaultdict(deque)

    def check(self, name: str, places: int) -> None:
        """Raise KeyLimitError unless the key `name` may have `places` more prompts now."""
        limit = self._max_concurrency
        if limit is not None and self._open[name] + places > limit:
            raise KeyLimitError(
                f"This API key has {self._open[name]} unfinished requests of at most {limit}",
                _RETRY_AFTER_S,
            )
        if self._rpm is None:
            return
        moments, now = self._accepted[name], self._clock()
        while moments and moments[0] <= now - _MINUTE_S:
            moments.popleft()
        excess = len(moments) + places - self._rpm
        if excess > 0:
            # Where `places` alone is too much, waiting for an empty minute is the best that helps.
            freed = moments[min(excess, len(moments)) - 1] if moments else now
            raise KeyLimitError(
                f"This API key has sent {len(moments)} requests of at most {self._rpm} a minute",
                max(math.ceil(freed + _MINUTE_S - now), 1),
            )

    def take(self, name: str, places: int) -> None:
        """Count prompts that have been accepted."""
        self._open[name] += places
        if self._rpm is not None:
            self._accepted[name].extend([self._clock()] * places)

    def uncount(self, name: str, places: int) -> None:
        """Take back the last prompts of the minute, whose request was refused after all."""
        moments = self._accepted[name]
        for _ in range(min(places, len(moments))):
            moments.pop()

    def give(self, name: str, places: int) -> None:
        """Count prompts that have ended."""
        self._open[name] -= places
        if self._open[name] == 0:
            del self._open[name]
