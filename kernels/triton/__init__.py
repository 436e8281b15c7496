"""GPU kernels in Triton: each file holds a kernel and the host function that checks and starts it.

Every function has a twin of the same signature in `octavo.kernels.reference`.
"""

from octavo.kernels.triton.activation import gelu_and_mul, silu_and_mul
from octavo.kernels.triton.attention import paged_attention, scaled_paged_attention
from octavo.kernels.triton.compilations import use_writable_cache, watch_compilations
from octavo.kernels.triton.cutoff import find_cutoff
from octavo.kernels.triton.draw import draw_seeded
from octavo.kernels.triton.host import reads_fp8
from octavo.kernels.triton.kv_cache import copy_blocks, swap_blocks, write_kv_cache
from octavo.kernels.triton.log_sum_exp import log_sum_exp
from octavo.kernels.triton.norm import add_rms_norm, rms_norm
from octavo.kernels.triton.penalties import penalize
from octavo.kernels.triton.projection import (
    embedding,
    linear,
    linear_in_slices,
    pack_linear,
    sum_in_fp32,
)
from octavo.kernels.triton.rotary import rotary_embedding, rotate_and_cache

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "draw_seeded",
    "embedding",
    "find_cutoff",
    "gelu_and_mul",
    "linear",
    "linear_in_slices",
    "log_sum_exp",
    "pack_linear",
    "paged_attention",
    "penalize",
    "reads_fp8",
    "rms_norm",
    "rotary_embedding",
    "rotate_and_cache",
    "scaled_paged_attention",
    "silu_and_mul",
    "sum_in_fp32",
    "swap_blocks",
    "use_writable_cache",
    "watch_compilations",
    "write_kv_cache",
]
