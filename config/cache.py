"""The paged KV cache: how large it is and how it is shared."""

from typing import Literal

from pydantic import Field

from octavo.config.base import ConfigModel


class CacheConfig(ConfigModel):
    """Blocks, their number and their reuse."""

    block_size: int = Field(
        default=16, ge=1, le=256, description="Token positions in one block of the KV cache."
    )
    gpu_memory_utilization: float = Field(
        default=0.92, gt=0, le=1, description="Share of the GPU's memory that may be used in all."
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Bytes for the KV cache; default: from the GPU's memory, "
        "or on CPU a share of what is free.",
    )
    num_gpu_blocks_override: int | None = Field(
        default=None, ge=1, description="Exact number of cache blocks, on CPU too."
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="Precision of the KV cache: auto is that of the model; fp8 (e4m3 with a scale "
        "per KV head, on GPUs that read it) holds twice the tokens of bfloat16.",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="Keep full blocks and share them between equal prefixes."
    )
    swap_space: float = Field(
        default=4.0,
        ge=0,
        allow_inf_nan=False,
        description="GiB of host memory for the blocks of preempted sequences; 0 is none.",
    )
    kv_offload: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="GiB of host memory for cached blocks that were evicted, to come back on a "
        "hit; 0 is none.",
    )
