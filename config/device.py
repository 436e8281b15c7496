"""Where the model runs."""

from typing import Literal

from pydantic import Field

from octavo.config.base import ConfigModel


class DeviceConfig(ConfigModel):
    """The device and its threads."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device; auto takes a GPU where there is one."
    )
