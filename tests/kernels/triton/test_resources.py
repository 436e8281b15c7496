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
rows = list(table([v for name in names for v in VARIANTS if v.name == name], targets))
print(*rows, sep="\\n")
sys.exit(not rows or not all(row.fits for row in rows))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("variants", "targets"),
    [
        ("decode 128 bf16;prefill 128 bf16;rotate, norm bf16", "sm_80;sm_100;gfx942"),
        ("prefill 256 bf16;rotate, norm bf16", "sm_89"),
        ("prefill 128 bf16 e4m3;rotate, norm bf16 e4m3;rows bf16;cache bf16", "sm_90"),
        ("prefill 64 bf16 e4m3", "sm_90;sm_100"),
        ("sampling;skinny linear bf16", "sm_90"),
        # Its warps have 64 threads.
        ("sampling", "gfx942"),
    ],
    ids=["main path", "small memory", "fp8 and small ops", "small fp8 heads", "sampling", "CDNA"],
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


STEPS = """
from octavo.kernels.triton.resources import TARGETS, launches_of
from octavo.kernels.triton.variants import Attention

keys = {
    launch.key
    for sequences in (1, 2, 16, 37)
    for width in (256, 257)
    for offset in (0, 1)
    for launch in launches_of(
        Attention(1, 128, sequences=sequences, table_width=width, offset=offset), TARGETS["sm_90"]
    )
}
print(*sorted(keys), sep="\\n")
"""


def test_steps_of_any_size_and_place_share_their_programs() -> None:
    run = subprocess.run(
        [sys.executable, "-c", STEPS],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    kernels = [line.split()[0] for line in run.stdout.splitlines()]
    assert kernels == ["decode", "merge"]
