"""Where the model runs."""

import re
from typing import Literal

from pydantic import Field, field_validator

from octavo.config.base import ConfigModel


class DeviceConfig(ConfigModel):
    """The device and its threads."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device; auto takes a GPU where there is one."
    )
    cpu_threads: str = Field(
        default="auto",
        coerce_numbers_to_str=True,
        description="Threads of a step on CPU; auto uses every core while that is faster than one.",
    )

    enforce_eager: bool = Field(
        default=False, description="Run decode steps kernel by kernel, not as CUDA graphs."
    )
    deterministic: bool = Field(
        default=False,
        description="On a GPU, make results independent of what else is in a step, at a cost.",
    )

    @field_validator("cpu_threads")
    @classmethod
    def _check_threads(cls, value: str) -> str:
        if re.fullmatch("auto|[1-9][0-9]{0,2}", value) is None:
            raise ValueError("must be auto or a number from 1 to 999")
        return value

    @property
    def num_cpu_threads(self) -> int | None:
        """Threads of a step on CPU; None leaves the choice to the kernels."""
        return None if self.cpu_threads == "auto" else int(self.cpu_threads)
