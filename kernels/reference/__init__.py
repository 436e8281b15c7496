"""Plain-torch kernels: production code where nothing faster fits, and the oracle of the rest."""

from octavo.kernels.reference.activation import gelu_and_mul, silu_and_mul
from octavo.kernels.reference.attention import paged_attention
from octavo.kernels.reference.kv_cache import copy_blocks, swap_blocks, write_kv_cache
from octavo.kernels.reference.norm import add_rms_norm, rms_norm
from octavo.kernels.reference.projection import (
    embedding,
    linear,
    linear_in_slices,
    pack_linear,
)
from octavo.kernels.reference.rotary import rotary_embedding
from octavo.kernels.reference.scaled_cache import rotate_and_cache, scaled_paged_attention
from octavo.kernels.reference.seeded import draw_seeded, find_cutoff, log_sum_exp, penalize

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
    "rms_norm",
    "rotary_embedding",
    "rotate_and_cache",
    "scaled_paged_attention",
    "silu_and_mul",
    "swap_blocks",
    "write_kv_cache",
]
