"""Nothing is compiled once the server is ready: a start and requests of all kinds, launches caught.

In processes of their own, since this one may have imported Triton with its interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "late_compilations.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", ["qwen3", "mistral eager", "llama eager fp8"])
def test_what_serving_launches_has_been_compiled_at_the_start(options: str) -> None:
    run = subprocess.run(
        [sys.executable, SCRIPT, *options.split()],
        env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-3000:]


def test_a_missing_warm_up_is_told() -> None:
    without = (
        "import late_compilations as late; from octavo.engine.executor import gpu;"
        "gpu.warm_up_variants = lambda *_: None; raise SystemExit(late.main('llama', ['eager']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", without],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(SCRIPT.parent)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1, run.stdout + run.stderr[-3000:]
    # Copies of blocks are launched where texts fork or give way.
    assert "late: decode" in run.stdout and "late: copy" in run.stdout, run.stdout
