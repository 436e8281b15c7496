"""From a checkpoint to a model."""

import torch

from octavo.engine.core.errors import CheckpointError
from octavo.engine.loader.checkpoint import Checkpoint
from octavo.engine.models.decoder import CausalLM
from octavo.engine.models.registry import build_model
from octavo.engine.models.weights import TensorError


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Build the model and fill it, tensor by tensor. Raises CheckpointError."""
    model = build_model(checkpoint.model_config, dtype, device)
    if checkpoint.weights is None:
        model.init_dummy_weights(seed=0)
    else:
        try:
            model.load_weights(checkpoint.weights())
        except TensorError as error:
            raise CheckpointError(f"{checkpoint.name}: {error}") from error
    return model
