"""Filling a model from a stream of named tensors."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from octavo.engine.core.errors import CheckpointError
from octavo.engine.layers.linear import WeightSlot

logger = logging.getLogger(__name__)

_NAMED = 5
"""How many tensors a message names before it only counts them."""

_DUMMY_STD = 0.02


class TensorError(CheckpointError):
    """A tensor of a checkpoint is missing, there twice, or of another shape.

    The message does not say in which checkpoint.
    """


def load_weights(slots: Mapping[str, WeightSlot], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies each tensor into its slot and packs each linear layer as soon as it is complete.

    Packing at once keeps only one layer in memory twice. Names may lack the leading "model.", as
    in checkpoints of the bare decoder. See `CausalLM.load_weights` for the errors.
    """
    open_slots = Counter(slot.layer for slot in slots.values() if slot.layer is not None)
    filled: set[str] = set()
    extra: list[str] = []
    for given, tensor in weights:
        name = given if given in slots else f"model.{given}"
        slot = slots.get(name)
        if slot is None:
            extra.append(given)
            continue
        if name in filled:
            raise TensorError(f"the checkpoint holds the tensor {given} more than once")
        _fill(given, slot, tensor)
        filled.add(name)
        if slot.layer is not None:
            open_slots[slot.layer] -= 1
            if not open_slots[slot.layer]:
                slot.layer.pack()
    missing = [name for name in slots if name not in filled]
    if missing:
        raise TensorError(f"the checkpoint lacks {_listed(missing)}")
    # Old checkpoints store this table, which follows from the configuration.
    extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
    if extra:
        logger.warning("the checkpoint holds tensors without a use: %s", _listed(extra))


def _fill(name: str, slot: WeightSlot, tensor: Tensor) -> None:
    if tensor.shape != slot.target.shape:
        raise TensorError(
            f"the tensor {name} has the shape {list(tensor.shape)}, but the configuration "
            f"asks for {list(slot.target.shape)}"
        )
    slot.target.copy_(tensor)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    rest = len(names) - _NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown


def dummy_weights(slots: Mapping[str, WeightSlot], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Normal weights of a deviation that keeps activations in range, norms of 1, biases of 0."""
    for index, (name, slot) in enumerate(slots.items()):
        target = slot.target
        if name.endswith(".bias"):
            yield name, torch.zeros_like(target)
        elif name.endswith("norm.weight"):
            yield name, torch.ones_like(target)
        else:
            generator = torch.Generator(target.device).manual_seed(seed * len(slots) + index)
            noise = torch.empty_like(target).normal_(std=_DUMMY_STD, generator=generator)
            yield name, noise
