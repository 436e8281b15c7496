"""What paged attention has to know about the sequences of a step."""

from typing import Protocol

from torch import Tensor


class PagedBatch(Protocol):
    """Where the tokens of S sequences live; T query tokens in all.

    The engine's attention metadata has this shape, so one object built per step serves all layers.

    block_tables      int32 [S, B]   block ids of each sequence; entries past its end are unused
    seq_lens          int32 [S]      tokens of each sequence in the cache, this step's included
    query_start_loc   int32 [S + 1]  first query token of each sequence, then T
    max_query_len, max_seq_len       the largest of each, on the host
    """

    @property
    def block_tables(self) -> Tensor: ...
    @property
    def seq_lens(self) -> Tensor: ...
    @property
    def query_start_loc(self) -> Tensor: ...
    @property
    def max_query_len(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...


class StepBatch(PagedBatch, Protocol):
    """What the kernels of a GPU ask beside.

    decode_tokens     the sum of `seq_lens` over the sequences with one query token, or more; 0 if
                      there is none of these, None where the host does not know
    """

    @property
    def decode_tokens(self) -> int | None: ...
