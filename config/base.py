"""The base of all configuration models."""

from pydantic import BaseModel, ConfigDict


class ConfigModel(BaseModel):
    """Frozen; unknown keys are errors. Each field is a flag, a variable and a YAML key."""

    model_config = ConfigDict(extra="forbid", frozen=True)
