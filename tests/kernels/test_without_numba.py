"""Kernels where Numba is missing or broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import torch
from octavo.kernels import ops
x, weight = torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
print(ops.linear(x, ops.pack_linear(weight)).tolist(), ops.can_quantize(x.dtype, x.device))
ops.set_cpu_threads(x.dtype, 1)
"""


@pytest.mark.parametrize("broken", ["raise ModuleNotFoundError('gone')", "1 / 0"])
def test_torch_does_the_work(broken: str, tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text(broken)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[[1.0, 3.0], [2.0, 4.0]] False"
    (warning,) = [line for line in done.stderr.splitlines() if "numba" in line]
    assert "plain torch is used" in warning
