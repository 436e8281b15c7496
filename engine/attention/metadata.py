"""What one forward pass reads: built once per step by the model runner, then read-only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.cache_args import PagedCache


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Shape of the cache of one layer; K and V are two tensors of the same shape.

    The last block is a dummy outside the pool that padding rows may write.
    """

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[num_blocks + 1, num_kv_heads, block_size, head_dim]."""
        return (self.num_blocks + 1, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block in one layer."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


LayerKVCache = PagedCache
"""The cache tensors of one layer, each of `KVCacheLayout.shape`."""

CacheScales = tuple[Tensor | None, Tensor | None]
"""Of the keys and of the values of one layer, float32 [Hkv] each; None is 1."""

NO_SCALES: CacheScales = (None, None)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a step live. Rows are sequences, S of them; T tokens in all.

    slot_mapping      int64 [T]      flat cache address of each token: block id * block_size + row
    block_tables      int32 [S, B]   block ids of each sequence; entries past its end are 0
    seq_lens          int32 [S]      tokens of each sequence in the cache after this step
    query_start_loc   int32 [S + 1]  first token of each sequence within the step, then T
    max_query_len, max_seq_len       the largest of each, on the host, for choosing kernels
    decode_tokens    at least the sum of `seq_lens` over the sequences with one query token, 0 if
                     there is none; None where no kernel asks
    """

    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    decode_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Everything one forward pass reads.

    input_ids        int64 [T]
    positions        int64 [T]
    logits_indices   int64 [L]   rows of the hidden states whose logits are wanted
    kv_caches                    one entry per layer
    """

    input_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    attention: AttentionMetadata
    kv_caches: tuple[LayerKVCache, ...]
