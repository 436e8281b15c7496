"""Whether steps share their work among threads: they do unless they are faster alone.

Where another process keeps a core busy, a step on two threads waits for the one that has been put
aside, and one thread would be done sooner. What the other processes do cannot be asked for, so both
ways are timed on steps of the same size.
"""

from collections import deque

_TRIAL_STEPS = 6
# A way has to be so much faster to be changed to.
_GAIN = 0.9
# Steps from one trial to the next: often while things change, seldom while they stay.
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 2048
# So many times the best average is worth a trial before its time.
_SUSPICIOUS = 1.25
# Longer steps are too unlike each other to be compared; they go the way of the short ones.
_MOST_TOKENS = 256


class ThreadChoice:
    """Judges steps by their times; `shares` says how the next one is to run.

    A trial runs a few steps the other way. It is given up when the size of the steps changes, and
    it is followed by a pause, twice as long as the one before when all stays as it was.
    """

    def __init__(self) -> None:
        self.shares = True
        self._tokens = 0
        self._usual: deque[float] = deque(maxlen=_TRIAL_STEPS)
        self._trial: list[float] | None = None
        self._best = float("inf")
        self._pause = self._left = _FIRST_PAUSE

    def ended(self, num_tokens: int, seconds: float) -> None:
        """Take note of a step of `num_tokens` that ran as `shares` says for `seconds`."""
        if num_tokens > _MOST_TOKENS:
            return
        if num_tokens != self._tokens:
            self._give_up(num_tokens)
        if self._trial is not None:
            self._trial.append(seconds)
            if len(self._trial) == _TRIAL_STEPS:
                self._judge(sum(self._trial), sum(self._usual))
            return
        self._usual.append(seconds)
        self._left -= 1
        if len(self._usual) < _TRIAL_STEPS:
            return
        average = sum(self._usual) / _TRIAL_STEPS
        self._best = min(self._best, average)
        is_suspicious = average > _SUSPICIOUS * self._best
        if self._left <= 0 or (is_suspicious and self._pause - self._left >= _FIRST_PAUSE):
            self._trial = []
            self.shares = not self.shares

    def _give_up(self, num_tokens: int) -> None:
        if self._trial is not None:
            self.shares = not self.shares
        self._tokens, self._trial, self._best = num_tokens, None, float("inf")
        self._usual.clear()

    def _judge(self, tried: float, usual: float) -> None:
        if tried < _GAIN * usual:
            self._pause = _FIRST_PAUSE
        else:
            self.shares = not self.shares
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._left, self._trial = self._pause, None
        # Contexts grow: what was usual just now is what later steps are held against.
        self._best = min(tried, usual) / _TRIAL_STEPS
        self._usual.clear()
