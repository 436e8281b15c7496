"""Sizes that are settled once the model is loaded."""

from dataclasses import dataclass, field

from octavo.engine.core.errors import (
    ConfigurationError,
    ContextLengthError,
    InvalidRequestError,
)
from octavo.engine.core.sampling_params import SamplingParams


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

    def check_beams(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Refuse a beam search whose beams could not run side by side, were they alone.

        So is one whose allowed ids make fewer texts than it shall return. Raises
        InvalidRequestError or ContextLengthError; nothing for requests without beams.
        """
        if not params.use_beam_search:
            return
        width = params.beam_width
        if width > self.max_num_seqs:
            raise InvalidRequestError(
                f"{width} beams are more than the {self.max_num_seqs} sequences of a step",
                "n" if params.best_of is None else "best_of",
            )
        num_shared = num_prompt_tokens // self.block_size
        num_each = -(-(num_prompt_tokens + params.max_tokens) // self.block_size) - num_shared
        num_needed = num_shared + width * num_each
        if num_needed > self.num_blocks:
            raise ContextLengthError(
                f"the cache holds {self.num_blocks} blocks of {self.block_size} tokens, but "
                f"{width} beams of {params.max_tokens} tokens after a prompt of "
                f"{num_prompt_tokens} need {num_needed}",
                "max_tokens",
            )
        num_texts = self._num_texts(params)
        if num_texts < params.n:
            raise InvalidRequestError(
                f"{params.n} texts are asked for, but the allowed token ids make only {num_texts}",
                "n" if params.allowed_token_ids is None else "allowed_token_ids",
            )

    def _num_texts(self, params: SamplingParams) -> int:
        """How many different texts a search can find; `n` stands for more.

        Without any token there is one text, which is returned as often as it is asked for.
        """
        if params.max_tokens == 0:
            return params.n
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        num_allowed = self.vocab_size
        if params.allowed_token_ids is not None:
            num_allowed = len(set(params.allowed_token_ids))
            ends.intersection_update(params.allowed_token_ids)
        num_others = num_allowed - len(ends)
        num_texts = 1
        for position in range(params.max_tokens, 0, -1):
            # End tokens are masked up to min_tokens.
            num_ends = len(ends) if position > params.min_tokens else 0
            num_texts = min(num_ends + num_others * num_texts, params.n)
            if num_texts == params.n and num_others > 0:
                break
        return num_texts
