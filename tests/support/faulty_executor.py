"""An executor that fails on purpose, around one that works."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.executor.base import Executor


@dataclass
class Fault:
    """What happens from step number `step` on.

    `act` is called before or after the inner step and may raise or wait; `spoil` says of which
    sequences, by their number of appearance, the row comes out as NaN.
    """

    step: int = 0
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    spoil: Callable[[int], bool] = lambda number: False


class FaultyExecutor:
    """Runs `inner`, with a fault once one is set."""

    def __init__(self, inner: Executor) -> None:
        self.fault = Fault()
        self._inner = inner
        self._num_steps = 0

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        active = self._num_steps >= self.fault.step
        self._num_steps += 1
        if active:
            self.fault.before()
        output = self._inner.execute_model(plan)
        if not active:
            return output
        self.fault.after()
        spoilt = {seq_id for seq_id in output.sampled if self.fault.spoil(seq_id)}
        return ModelOutput(
            sampled={k: v for k, v in output.sampled.items() if k not in spoilt},
            failed={**output.failed, **dict.fromkeys(spoilt, "the logits are not finite")},
        )

    def shutdown(self) -> None:
        self._inner.shutdown()


def crash() -> None:
    """Raise something with a detail that must not reach a client."""
    raise ValueError("a secret detail")


class Stall:
    """Waits until released; a test releases it at its end."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __call__(self) -> None:
        deadline = time.monotonic() + 30
        while not self.released.wait(0.01) and time.monotonic() < deadline:
            pass
