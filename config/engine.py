"""All of the engine's configuration, and the checks that span its parts."""

from typing import Self

from pydantic import Field, model_validator

from octavo.config.base import ConfigModel
from octavo.config.cache import CacheConfig
from octavo.config.device import DeviceConfig
from octavo.config.load import LoadConfig
from octavo.config.scheduler import SchedulerConfig


class EngineConfig(ConfigModel):
    """What the engine is told before it starts; nothing is written back into it."""

    load: LoadConfig = Field(default_factory=LoadConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    device: DeviceConfig = Field(default_factory=DeviceConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        scheduler = self.scheduler
        if (
            scheduler.max_num_seqs is not None
            and scheduler.max_num_batched_tokens is not None
            and scheduler.max_num_batched_tokens < scheduler.max_num_seqs
        ):
            raise ValueError(
                f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} is below "
                f"--max-num-seqs {scheduler.max_num_seqs}: a step could not hold one token of each "
                f"sequence; give --max-num-batched-tokens {scheduler.max_num_seqs} or more"
            )
        return self
