"""What is loaded before torch is imported must not change what torch is."""

import subprocess
import sys

SCRIPT = """
import sys
from octavo.engine.preload import preload_torch
preload_torch()
assert "torch" not in sys.modules
with open("/proc/self/maps") as maps:
    before = {line.split()[-1] for line in maps if "libtorch_cpu.so" in line}
import torch
with open("/proc/self/maps") as maps:
    after = {line.split()[-1] for line in maps if "libtorch_cpu.so" in line}
assert len(before) == 1 and before == after, (before, after)
assert (torch.ones(3) @ torch.ones(3)).item() == 3
"""


def test_torch_uses_the_library_that_was_loaded_before_it() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
