"""Settings of the library that multiplies on a GPU."""

import os
import subprocess
import sys

# As NVIDIA's images do. The settings are there without a GPU too.
_SETTINGS = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "TRITON_INTERPRET": "0"}

_SHOWN = """
import torch

def show():
    products = torch.backends.cuda.matmul
    print(
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_tf32,
    )

show()
torch.cuda.is_available = lambda: True
from octavo.kernels import ops
show()
"""


def test_sums_and_factors_of_fp32_stay_in_fp32_where_there_is_a_gpu() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _SHOWN],
        env={**os.environ, **_SETTINGS},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["True True True", "False False False"]
