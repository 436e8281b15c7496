"""What a resolved checkpoint is."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are all on this machine.

    `name` is what the model is called by default. `generation_defaults` holds the sampling
    defaults of its generation_config.json under the names of the HTTP fields. `weights` reads the
    tensors, by their names in Hugging Face format, one after the other; None stands for random
    ones (`--load-format dummy`).
    """

    name: str
    model_config: ModelConfig
    tokenizer_dir: Path
    generation_defaults: Mapping[str, Any]
    weights: Callable[[], Iterator[tuple[str, Tensor]]] | None
