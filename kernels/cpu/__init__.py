"""CPU kernels, compiled by Numba; what has no kernel here is plain torch.

Guarantee: what is computed for a token depends, to the last bit, only on that token, its
position and the tokens before it: not on the other tokens of the step, on how a prompt was cut
into steps, on what came from the prefix cache, or on threads. So greedy answers never depend on
the company, in any element type. This rests on three rules, held by tests: a linear layer adds
over its inputs in one chain in their order (in pairs, where a processor multiplies pairs of
bfloat16), for each number of rows; sums across the lanes of a vector spell out their order; spans
of keys begin at multiples of their length. Processors with and without AVX-512, and with its
products of bfloat16, run different forms, whose last bits differ.

One chain means that a step of one token waits for each sum before the next: on AVX-512 that still
takes 128 bytes of weights in six cycles, more than memory gives.
"""

from octavo.kernels.cpu.activation import gelu_and_mul, silu_and_mul
from octavo.kernels.cpu.attention import paged_attention
from octavo.kernels.cpu.kv_cache import write_kv_cache
from octavo.kernels.cpu.linear import linear, pack_int8_linear, pack_linear
from octavo.kernels.cpu.norm import add_rms_norm, rms_norm
from octavo.kernels.cpu.pool import shared_pool
from octavo.kernels.cpu.program import Program
from octavo.kernels.cpu.rotary import rotary_embedding
from octavo.kernels.cpu.sampling import argmax, draw, draw_filtered
from octavo.kernels.cpu.selftest import can_quantize, can_sample, usable
from octavo.kernels.reference import copy_blocks, embedding

__all__ = [
    "Program",
    "add_rms_norm",
    "argmax",
    "can_quantize",
    "can_sample",
    "copy_blocks",
    "draw",
    "draw_filtered",
    "embedding",
    "gelu_and_mul",
    "linear",
    "pack_int8_linear",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "shared_pool",
    "silu_and_mul",
    "usable",
    "write_kv_cache",
]
