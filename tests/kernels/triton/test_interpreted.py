"""Runs the tests below `interpreted/`, where the kernels run on the CPU in Triton's interpreter.

Triton decides when a kernel is defined whether it will be interpreted, so they get a process of
their own. To run one of them: TRITON_INTERPRET=1 pytest tests/kernels/triton/interpreted -k NAME
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(600)
def test_kernels_equal_their_twins() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
