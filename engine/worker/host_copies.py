"""Small tensors on their way to the device."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`, for whose copy the host does not wait.

    From ordinary memory it would wait for all that the device has to do before.
    """
    if device.type != "cuda":
        return tensor.to(device)
    # The pinned copy is not used again before the device has read it: torch sees to that.
    return tensor.pin_memory().to(device, non_blocking=True)
