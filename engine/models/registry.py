"""Which architectures can be served."""

import torch

from octavo.config.model import SUPPORTED_MODEL_TYPES, ModelConfig
from octavo.engine.core.errors import CheckpointError
from octavo.engine.models.decoder import CausalLM

__all__ = ["SUPPORTED_MODEL_TYPES", "build_model"]


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """A model of the architecture, its weights not yet loaded, computing in `dtype`."""
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise CheckpointError(
            f"model_type {config.model_type!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    with torch.device(device):
        return CausalLM(config, dtype)
