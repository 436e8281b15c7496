"""Weights are loaded shard by shard: the peak is that of the weights and a little, not twice them.

In processes of their own, whose memory nothing else has grown; the system counts it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHARD = 12_000_000

LOAD = """
import sys
from contextlib import nullcontext
from pathlib import Path
import torch
from octavo.config.load import LoadConfig
from octavo.engine.loader import resolve_checkpoint
from octavo.engine.loader.filling import load_model
from octavo.kernels import ops

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

with ops.reference_only() if sys.argv[2] == "plain" else nullcontext():
    # Kernels are compiled before, if they have to be.
    small = torch.ones(64, 64, dtype=torch.bfloat16)
    ops.linear(small, ops.pack_linear(small))
    checkpoint = resolve_checkpoint(LoadConfig(model=sys.argv[1]))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS:")
    model = load_model(checkpoint, torch.bfloat16, torch.device("cpu"))
print(memory("VmHWM:") - before)
"""


@pytest.fixture(scope="module")
def sharded_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 107 MB in many shards."""
    directory = tmp_path_factory.mktemp("sharded")
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size=SHARD)
    return directory


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not tell the peak"
)
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_loading_takes_little_more_memory_than_the_weights(sharded_dir: Path, layout: str) -> None:
    # A GPU keeps layers as they are in files; the CPU's kernels repack each, which is there twice.
    shards = [path.stat().st_size for path in sharded_dir.glob("*.safetensors")]
    assert len(shards) > 8 and max(shards) <= SHARD + 10_000
    run = subprocess.run(
        [sys.executable, "-c", LOAD, sharded_dir, layout],
        # Tensors that are let go go back to the system at once, not into a heap.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    peak, weights = int(run.stdout), sum(shards)
    assert weights / 2 < peak < weights + (2 if layout == "plain" else 4) * SHARD
