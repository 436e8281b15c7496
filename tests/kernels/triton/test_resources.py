"""Kernels compiled ahead of time for GPUs that are not here: registers, shared memory, spills.

A selection that shows every kernel, every architecture and every way of attention; the whole table
comes from `python -m octavo.kernels.triton.resources`. It runs in a process of its own, since
this one may have imported Triton with its interpreter.
"""

import os
import subprocess
import sys

import pytest

SELECTED = """
import sys
from octavo.kernels.triton.resources import HEADER, table
from octavo.kernels.triton.variants import VARIANTS

names, targets = sys.argv[1].split(";"), sys.argv[2].split(";")
print(HEADER)
rows = list(table([variant for name in names for variant in VARIANTS if variant.name == name], targets))
print(*rows, sep="\\n")
sys.exit(not rows or not all(row.fits for row in rows))
"""


@pytest.mark.parametrize(
    ("variants", "targets"),
    [
        ("decode 128 bf16;prefill 128 bf16;rotate, norm bf16", "sm_80;sm_100;gfx942"),
        ("prefill 128 bf16 window;prefill 256 bf16;chunk 80 fp16;rotate, norm bf16", "sm_89"),
        ("prefill 128 bf16 e4m3;rotate, norm bf16 e4m3;rows bf16;cache bf16", "sm_90"),
        ("sampling;skinny linear bf16", "sm_90"),
    ],
    ids=["main path", "small memory", "fp8 and small ops", "sampling"],
)
def test_no_spills_and_enough_shared_memory(variants: str, targets: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SELECTED, variants, targets],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    sys.stdout.write(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
