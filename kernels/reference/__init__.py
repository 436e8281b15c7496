"""Plain-torch kernels: production code where nothing faster fits, and the oracle of the rest."""

from octavo.kernels.reference.activation import gelu_and_mul, silu_and_mul
from octavo.kernels.reference.attention import paged_attention
from octavo.kernels.reference.kv_cache import copy_blocks, write_kv_cache
from octavo.kernels.reference.norm import add_rms_norm, rms_norm
from octavo.kernels.reference.projection import embedding, linear, pack_linear
from octavo.kernels.reference.rotary import rotary_embedding

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "embedding",
    "gelu_and_mul",
    "linear",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "write_kv_cache",
]
