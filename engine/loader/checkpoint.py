"""What a resolved checkpoint is."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.config.model import ModelConfig
from octavo.engine.core.pooling import DEFAULT_EMBEDDING, EmbeddingSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are all on this machine.

    `name` is what the model is called by default. `generation_defaults` holds the sampling
    defaults of its generation_config.json under the names of the HTTP fields. `weights` reads the
    tensors, by their names in Hugging Face format, one after the other; None stands for random
    ones (`--load-format dummy`). `embedding` says how it makes embeddings, and `generates` whether
    it has what it takes to make texts too.
    """

    name: str
    model_config: ModelConfig
    tokenizer_dir: Path
    generation_defaults: Mapping[str, Any]
    weights: "Callable[[], Iterator[tuple[str, Tensor]]] | None"
    embedding: EmbeddingSpec = DEFAULT_EMBEDDING
    generates: bool = True

    @property
    def vocab_size(self) -> int:
        """Ids that the model takes."""
        return self.model_config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self.model_config.eos_token_ids


@dataclass(frozen=True, slots=True)
class EncoderCheckpoint:
    """An encoder, which makes embeddings only; all its files are on this machine.

    `directory` holds configuration and weights in Hugging Face format. `max_model_len` is the
    longest text in tokens.
    """

    name: str
    directory: Path
    tokenizer_dir: Path
    embedding: EmbeddingSpec
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    generates: Literal[False] = False
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
