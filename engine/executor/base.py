"""How the engine reaches the model: one protocol, whatever runs behind it."""

from typing import Protocol

from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput


class Executor(Protocol):
    """Runs the plan of one step. Called from the engine thread only."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache, measured or given; fixed once the executor is made."""

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        """Carry out one step and return its results.

        An exception from here is fatal for the engine; what belongs to one row is reported in
        `ModelOutput.failed` instead.
        """

    def shutdown(self) -> None:
        """Release what the executor holds. Called once."""
