"""For how long requests may wait and run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds from the arrival of a prompt at the engine; None is no limit.

    `queue` ends at the prompt's first step, `total` at its last token.
    """

    queue: float | None = None
    total: float | None = None

    def deadline(self, arrival: float, waiting: bool, own_limit: float | None) -> float | None:
        """Return the moment at which a prompt is given up, if it stays as it is.

        `own_limit` is the client's; the shorter one of it and `total` counts.
        """
        limits = [limit for limit in (self.total, own_limit) if limit is not None]
        if waiting and self.queue is not None:
            limits.append(self.queue)
        return arrival + min(limits) if limits else None


NO_LIMITS = TimeLimits()
