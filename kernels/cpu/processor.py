"""What this processor can do, which decides the form of the kernels.

Numba compiles for the same features, so `NUMBA_CPU_FEATURES` also chooses the form.
"""

from llvmlite import binding
from numba.core import config


def _features() -> frozenset[str]:
    listed: str | None = config.CPU_FEATURES
    if listed is None:
        listed = binding.get_host_cpu_features().flatten()
    return frozenset(item[1:] for item in listed.split(",") if item.startswith("+"))


FEATURES = _features()

HAS_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= FEATURES
"""32 registers of sixteen float32, instead of 16 of eight."""

HAS_BF16_DOT = HAS_AVX512 and "avx512bf16" in FEATURES
"""Products of pairs of bfloat16, added to float32 by one instruction."""

LANES = 16 if HAS_AVX512 else 8
"""float32 in a register."""

PANEL = 2 * LANES
"""Output features whose weights lie side by side: a row of float32 fills two registers."""

MAX_ROWS = 12 if HAS_AVX512 else 5
"""Rows of a tile: their sums leave registers for the weights and a row's own number."""
