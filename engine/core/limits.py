"""Sizes that are settled once the model is loaded."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the executor measured or resolved; the engine refuses what lies beyond.

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
        assert self.max_model_len <= self.num_blocks * self.block_size, "a context beyond the pool"
        assert self.max_num_batched_tokens >= self.max_num_seqs, "a step without room for its rows"
