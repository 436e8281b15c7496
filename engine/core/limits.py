"""Sizes that are settled once the model is loaded."""

from dataclasses import dataclass

from octavo.engine.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the executor measured or resolved; the engine refuses what lies beyond.

    Raises ConfigurationError for sizes with which a request could wait for ever.

    `max_model_len` is the longest context in tokens, never more than the pool holds.
    `max_num_seqs` and `max_num_batched_tokens` bound one step in sequences and tokens.
    `eos_token_ids` are the ids that end a text by the model's own choice.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"a step of {self.max_num_batched_tokens} tokens has no room for one token of each "
                f"of {self.max_num_seqs} sequences; give --max-num-batched-tokens "
                f"{self.max_num_seqs} or more, or --max-num-seqs {self.max_num_batched_tokens} "
                "or fewer"
            )
        capacity = self.num_blocks * self.block_size
        if self.max_model_len > capacity:
            raise ConfigurationError(
                f"a context of {self.max_model_len} tokens does not fit into a cache of "
                f"{capacity}; give --max-model-len {capacity} or less, or a larger cache"
            )
