"""Whether steps share their work among threads: they do unless they are faster alone.

Where another process keeps a core busy, a step on two threads waits for the one that has been put
aside, and one thread would be done sooner. What the other processes do cannot be asked for, so both
ways are timed, each step against the usual time of a step of its size.
"""

from collections import deque
from collections.abc import Hashable

_TRIAL_STEPS = 6
# So many steps may go by until as many of a known size were among them.
_LONGEST_TRIAL = 18
# A way has to be so much faster to be changed to.
_GAIN = 0.9
# One step of a trial that takes so many times the usual ends it: those with prompts are long.
_HOPELESS = 1.4
# Steps from one trial to the next: often while things change, seldom while they stay.
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512
# Steps that take so many times the usual are worth a trial before its time.
_SUSPICIOUS = 1.25
# Seconds. Of steps with long prompts none is spent on a trial: one would cost more than it tells.
_LONG = 0.05
# What a step adds to the usual time of its size.
_WEIGHT = 0.5
_MOST_SIZES = 256


class ThreadChoice:
    """Judges steps by their times; `shares` says how the next one is to run, before its `ended`.

    A trial runs a few steps the other way, and ends as soon as they cannot win. It is followed by
    a pause, twice as long as the one before when all stays as it was.
    """

    def __init__(self) -> None:
        self._way = True  # what is taken for better; a trial goes the other way
        self._usual: dict[Hashable, float] = {}
        self._recent: deque[float] = deque(maxlen=_TRIAL_STEPS)  # times over usual ones
        self._trial: list[float] | None = None  # likewise
        self._tries = False  # whether the step that runs is part of it
        self._trial_left = 0
        self._steps = 0  # since the last trial
        self._due = self._pause = _FIRST_PAUSE

    def shares(self, size: Hashable) -> bool:
        """Whether a step is to share its work; steps of one `size` take about the same time."""
        self._tries = self._trial is not None and self._usual.get(size, _LONG) < _LONG
        return self._way != self._tries

    def ended(self, size: Hashable, seconds: float) -> None:
        """Take note of a step that ran as `shares` said for `seconds`."""
        usual = self._usual.get(size)
        if self._trial is not None:
            self._trial_left -= 1
        if self._tries:
            assert usual is not None
            self._judge(seconds / usual)
            return
        if self._trial_left == 0 and self._trial is not None:
            self._end_trial(self._pause)
        self._steps += 1
        if usual is None:
            if len(self._usual) == _MOST_SIZES:
                self._usual.pop(next(iter(self._usual)))
            self._usual[size] = seconds
            return
        self._usual[size] = usual + _WEIGHT * (seconds - usual)
        self._recent.append(seconds / usual)
        if self._trial is not None or len(self._recent) < _TRIAL_STEPS:
            return
        if sum(self._recent) > _SUSPICIOUS * _TRIAL_STEPS:
            # By then the usual times are those of now.
            soon = max(_FIRST_PAUSE, self._steps + _TRIAL_STEPS)
            self._due = min(self._due, soon)
        if self._steps >= self._due:
            self._trial, self._trial_left = [], _LONGEST_TRIAL

    def _judge(self, ratio: float) -> None:
        """Take note of a step of a trial that took `ratio` times the usual."""
        assert self._trial is not None
        self._trial.append(ratio)
        if ratio > _HOPELESS or sum(self._trial) >= _GAIN * _TRIAL_STEPS:
            self._end_trial(min(2 * self._pause, _LONGEST_PAUSE))
        elif len(self._trial) == _TRIAL_STEPS:
            self._way = not self._way
            # The other way has usual times of its own.
            self._usual.clear()
            self._end_trial(_FIRST_PAUSE)
        elif self._trial_left == 0:
            self._end_trial(self._pause)

    def _end_trial(self, pause: int) -> None:
        self._trial = None
        self._recent.clear()
        self._steps = 0
        self._due = self._pause = pause
