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


def load_weights(slots: dict[str, WeightSlot], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies each tensor into its slot and packs each linear layer as soon as it is complete.

    Packing at once keeps only one layer in memory twice: `slots` loses each slot that was filled,
    since it would keep the memory that was packed. Names may lack the leading "model.", as in
    checkpoints of the bare decoder. See `CausalLM.load_weights` for the errors.
    """
    open_slots = Counter(slot.layer for slot in slots.values() if slot.layer is not None)
    filled: set[str] = set()
    extra: list[str] = []
    for given, tensor in weights:
        name = given if given in slots or given in filled else f"model.{given}"
        if name in filled:
            raise TensorError(f"the checkpoint holds the tensor {given} more than once")
        slot = slots.pop(name, None)
        if slot is None:
            extra.append(given)
            continue
        _fill(given, slot, tensor)
        filled.add(name)
        if slot.layer is not None:
            open_slots[slot.layer] -= 1
            if not open_slots[slot.layer]:
                slot.layer.pack()
    if slots:
        raise TensorError(f"the checkpoint lacks {_listed(list(slots))}")
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
    """Normal weights of a deviation that keeps activations in range, norms of 1, biases of 0.

    A slot may be gone once its tensor was taken.
    """
    names = list(slots)
    for index, name in enumerate(names):
        target = slots[name].target
        if name.endswith(".bias"):
            yield name, torch.zeros_like(target)
        elif name.endswith("norm.weight"):
            yield name, torch.ones_like(target)
        else:
            generator = torch.Generator(target.device).manual_seed(seed * len(names) + index)
            noise = torch.empty_like(target).normal_(std=_DUMMY_STD, generator=generator)
            yield name, noise
