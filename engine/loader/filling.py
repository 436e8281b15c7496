"""From a checkpoint to a model."""

from dataclasses import dataclass

import torch

from octavo.engine.core.errors import CheckpointError, ConfigurationError
from octavo.engine.loader.checkpoint import Checkpoint
from octavo.engine.models.decoder import CausalLM
from octavo.engine.models.registry import build_model
from octavo.engine.models.weights import TensorError


@dataclass(frozen=True, slots=True)
class WeightRoom:
    """What the weights have to fit into: `free_bytes`, with linear layers in `int8` or not."""

    free_bytes: int
    int8: bool = False


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    room: WeightRoom | None = None,
) -> CausalLM:
    """Build the model and fill it, tensor by tensor.

    Raises CheckpointError, and before anything is read ConfigurationError for weights that do not
    fit into `room`.
    """
    model = build_model(checkpoint.model_config, dtype, device)
    if room is not None:
        # What was built has taken addresses, but no memory yet.
        _check_room(checkpoint.name, model, room)
    if checkpoint.weights is None:
        model.init_dummy_weights(seed=0)
    else:
        try:
            model.load_weights(checkpoint.weights())
        except TensorError as error:
            raise CheckpointError(f"{checkpoint.name}: {error}") from error
    return model


def _check_room(name: str, model: CausalLM, room: WeightRoom) -> None:
    needed = model.weight_bytes(room.int8)
    if needed <= room.free_bytes:
        return
    advice = ["use a smaller model"]
    if not room.int8 and model.weight_bytes(int8=True) <= room.free_bytes:
        advice.append("--quantization int8")
    if model.dtype == torch.float32 and needed // 2 <= room.free_bytes:
        advice.append("--dtype bfloat16")
    raise ConfigurationError(
        f"{name}: the weights take {needed} bytes of memory in "
        f"{'int8' if room.int8 else str(model.dtype).removeprefix('torch.')}, and "
        f"{room.free_bytes} are free; {' or '.join(advice)}, or free memory"
    )
