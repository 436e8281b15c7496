"""Sizes that are settled once the model is loaded."""

from dataclasses import dataclass, field

from octavo.engine.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """What was measured when the model was warm, in seconds.

    `compute_token` is one token of a prompt; `copy_block` one block to or from host memory.
    """

    compute_token: float
    copy_block: float


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Blocks of the cache that fit into host memory.

    `num_swap_blocks` are for preempted sequences and have ids from 0; `num_offload_blocks` are for
    evicted blocks and come after them. Without `costs` preemption recomputes unless told otherwise.
    """

    num_swap_blocks: int = 0
    num_offload_blocks: int = 0
    costs: PreemptionCosts | None = None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the executor measured or resolved; the engine refuses what lies beyond.

    Raises ConfigurationError for sizes with which a request could wait for ever.

    `max_model_len` is the longest context in tokens, never more than the pool holds.
    `max_num_seqs` and `max_num_batched_tokens` bound one step in sequences and tokens.
    `eos_token_ids` are the ids that end a text by the model's own choice. `window` is the longest
    sliding window of a model all of whose layers have one; None where a layer sees everything.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    host_memory: HostMemory = field(default_factory=HostMemory)
    window: int | None = None

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
