"""CPU kernels, compiled by Numba; what has no kernel here is plain torch."""

from octavo.kernels.cpu.activation import gelu_and_mul, silu_and_mul
from octavo.kernels.cpu.attention import paged_attention
from octavo.kernels.cpu.kv_cache import write_kv_cache
from octavo.kernels.cpu.linear import linear, pack_linear
from octavo.kernels.cpu.norm import add_rms_norm, rms_norm
from octavo.kernels.cpu.rotary import rotary_embedding
from octavo.kernels.cpu.selftest import usable
from octavo.kernels.reference import copy_blocks, embedding

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
    "usable",
    "write_kv_cache",
]
