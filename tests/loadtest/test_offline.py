"""The measurements in this process: what is counted, and the commands on tiny models."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from engine_harness import Harness, Sizes

from octavo.config.model import model_config_from_hf
from octavo.kernels import ops
from octavo.loadtest.cli import bench
from octavo.loadtest.offline import ceilings
from octavo.loadtest.offline.kernel_cases import KernelCases
from octavo.loadtest.offline.latency import BatchTimes, run_batch, summarize
from octavo.loadtest.offline.model_work import ModelWork
from octavo.loadtest.offline.quality import distance

SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
TINY = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_BUFFER_BYTES", 1 << 16)
    monkeypatch.setattr(ceilings, "_CPU_MATMUL", 32)


def test_parameters_are_those_of_the_model_card() -> None:
    work = ModelWork(model_config_from_hf(SMOLLM2_135M), itemsize=2)
    norms = (2 * 30 + 1) * 576
    assert work.layer_parameters + work.head_parameters + norms == 134_515_008
    assert ModelWork(work.facts, 2, 1.5).weight_bytes == 1.5 * (134_515_008 - norms)
    # Two tensors, three heads of 64, two bytes, thirty layers.
    assert work.kv_bytes(100) == 100 * 2 * 3 * 64 * 2 * 30


@pytest.mark.parametrize("window", [None, 1, 3, 7, 20])
def test_attention_is_counted_pair_by_pair(window: int | None) -> None:
    facts = model_config_from_hf(TINY).model_copy(update={"windows": (window, None)})
    work, length = ModelWork(facts, itemsize=4), 11
    pairs = sum(
        1
        for limit in facts.windows
        for query in range(length)
        for key in range(query + 1)
        if limit is None or query - key < limit
    )
    linear = 2 * (length * work.layer_parameters + work.head_parameters)
    assert work.prefill_operations(length) == linear + 4 * 4 * 16 * pairs


def test_prefill_and_decode_are_told_apart() -> None:
    engine = Harness(Sizes(max_num_batched_tokens=32)).engine
    times = BatchTimes()
    run_batch(engine, [[5] * 20, [6] * 20], 4, times)
    # Two chunks of the second prompt; the first sequence decodes beside the second of them.
    assert times.prefill_tokens == 20 + 12 + 8 + 1
    assert len(times.prefill) == len(times.total) == 1
    # The last step has one sequence only and does not count.
    assert times.decode_contexts == [22 + 21, 23 + 22]
    assert len(times.decode) == 2
    assert times.total[0] > times.prefill[0] + sum(times.decode)


def test_figures_of_a_batch() -> None:
    work = ModelWork(model_config_from_hf(TINY), itemsize=4)
    times = BatchTimes(100, [0.5, 2.0, 1.0], [0.2, 0.1, 0.4], [20, 22, 24], [1.0, 3.0, 2.0])
    row = summarize(times, batch_size=2, input_len=10, work=work)
    assert row.prefill_tokens_per_s == pytest.approx(100 / 3.5)
    assert row.first_token_ms == 1000
    assert (row.decode_step_ms, row.decode_tokens_per_s) == (200, 10)
    assert row.batch_ms == 2000
    read = work.weight_bytes + 2 * work.kv_bytes(11)
    assert row.decode_gb_per_s == pytest.approx(read / 0.2 / 1e9)
    computed = 3 * 2 * work.prefill_operations(10)
    assert row.prefill_gflops == pytest.approx(computed / 3.5 / 1e9)


def run_command(name: str, *arguments: str) -> Result:
    return CliRunner().invoke(bench, [name, *arguments])


def test_latency_command(random_llama_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    result = run_command(
        "latency",
        str(random_llama_dir),
        *("--batch-size", "1,3", "--input-len", "8", "--output-len", "4", "--num-iters", "1"),
        *("--cpu-threads", "1", "--num-gpu-blocks-override", "64", "--output-json", str(path)),
    )
    assert result.exit_code == 0, result.output
    saved = json.loads(path.read_bytes())
    assert [row["batch_size"] for row in saved["batches"]] == [1, 3]
    assert all(row["decode_gb_per_s"] > 0 for row in saved["batches"])
    assert saved["ceilings"]["copy_gb"] > 0


def test_latency_without_a_model_stands_beside_the_goal(
    random_llama_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    result = run_command(
        "latency",
        str(random_llama_dir),
        *("--load-format", "null", "--batch-size", "2", "--input-len", "8", "--output-len", "4"),
        *("--output-json", str(path)),
    )
    assert result.exit_code == 0, result.output
    saved = json.loads(path.read_bytes())
    assert saved["ceilings"] is None
    assert "no model run" in result.stdout
    size, _, step, p99, goal, _ = result.stdout.splitlines()[-1].split()
    (row,) = saved["batches"]
    assert (int(size), int(goal)) == (2, 306)
    assert float(step) == pytest.approx(row["decode_step_ms"] * 1000, abs=0.06)
    assert float(p99) == pytest.approx(row["decode_step_p99_ms"] * 1000, abs=0.06)


def test_a_batch_beyond_a_step_is_refused(random_llama_dir: Path) -> None:
    result = run_command(
        "latency", str(random_llama_dir), "--batch-size", "4", "--max-num-seqs", "2"
    )
    assert result.exit_code == 1
    assert "give --max-num-seqs 4" in result.stderr


@pytest.mark.parametrize("dataset", ["random", "custom", "prefix_repetition"])
def test_throughput_command(random_llama_dir: Path, tmp_path: Path, dataset: str) -> None:
    file, path = tmp_path / "p.jsonl", tmp_path / "r.json"
    file.write_text('{"prompt": "hello", "output_tokens": 3}\n{"prompt": [5, 6, 7]}')
    result = run_command(
        "throughput",
        str(random_llama_dir),
        *("--dataset-name", dataset, "--dataset-path", str(file), "--num-prompts", "4"),
        *("--input-len", "16", "--output-len", "3", "--num-gpu-blocks-override", "64"),
        *("--prefix-repetition-num-prefixes", "1", "--prefix-repetition-prefix-len", "32"),
        *("--prefix-repetition-suffix-len", "4", "--max-num-seqs", "1"),
        *("--output-json", str(path)),
    )
    assert result.exit_code == 0, result.output
    saved = json.loads(path.read_bytes())
    assert (saved["num_requests"], saved["num_failed"], saved["num_output_tokens"]) == (4, 0, 12)
    assert saved["output_tokens_per_second"] == pytest.approx(12 / saved["duration"])
    assert saved["num_cached_tokens"] == (3 * 32 if dataset == "prefix_repetition" else 0)


def test_throughput_needs_the_file_of_its_data_set() -> None:
    result = run_command("throughput", "--dataset-name", "sharegpt")
    assert result.exit_code == 2
    assert "needs --dataset-path" in result.stderr


@pytest.mark.parametrize("name", ["latency", "throughput", "kernels", "quality"])
def test_settings_are_checked_before_anything_is_loaded(name: str) -> None:
    result = run_command(name, "--block-size", "0")
    assert result.exit_code == 2
    assert "--block-size" in result.stderr


def test_kernels_command(random_llama_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    result = run_command(
        "kernels",
        str(random_llama_dir),
        *("--num-tokens", "1,3", "--num-seqs", "2", "--context", "20", "--only", "attention"),
        *("--output-json", str(path)),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_bytes())["kernels"]
    assert [row["name"] for row in rows] == ["attention decode", *["attention prefill"] * 2]
    assert all(row["gb_per_s"] > 0 for row in rows)


def test_every_case_runs_and_attention_sees_what_it_says() -> None:
    facts = model_config_from_hf(TINY)
    cases = KernelCases(facts, torch.float32, torch.device("cpu"), block_size=4)
    groups: list[Any] = [
        *(cases.linear([1, 3]), cases.elementwise(3), cases.rotation(3)),
        *(cases.attention(2, 1, 9), cases.copies(3), cases.sampling(2)),
    ]
    found = {case.name: case for group in groups for case in group}
    with ops.reference_only():
        for case in found.values():
            case.call()
            assert case.num_bytes > 0
    # Keys and values of two sequences, then queries and results; four bytes a number.
    attention = found["attention decode"]
    assert attention.num_bytes == 4 * (2 * 2 * 9 * 2 * 16 + 2 * 2 * 4 * 16)
    assert attention.num_operations == 4 * 2 * 9 * 4 * 16


def test_kernels_of_int8_weights_stand_beside_the_others(random_llama_dir: Path) -> None:
    result = run_command(
        "kernels",
        str(random_llama_dir),
        *("--num-tokens", "1", "--num-seqs", "1", "--only", "linear", "--quantization", "int8"),
    )
    assert result.exit_code == 0, result.output
    assert "linear head int8" in result.stdout
    assert "linear head  " in result.stdout


def test_quality_command(random_llama_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    result = run_command(
        "quality",
        str(random_llama_dir),
        *("--num-tokens", "40", "--context", "17", "--dtype", "bfloat16"),
        *("--output-json", str(path)),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_bytes())["comparisons"]
    assert [(row["weights"], row["computed_in"], row["reference"]) for row in rows] == [
        ("int8", "float32", "float32"),
        ("Q8_0", "float32", "float32"),
        ("as they are", "bfloat16", "float32"),
        ("int8", "bfloat16", "float32"),
        ("int8", "bfloat16", "bfloat16"),
    ]
    int8, q8_0 = (row["distance"] for row in rows[:2])
    assert 0 < int8["mean_kl"] < 2 * q8_0["mean_kl"]
    assert int8["top1"] > 0.9


def test_distance_of_predictions() -> None:
    # Of two positions one differs: 0.75 ln(0.75 / 0.25) + 0.25 ln(0.25 / 0.75).
    even = torch.tensor([0.25, 0.75]).log()
    found = distance(torch.stack([even, even]), torch.stack([even + 3, even.flip(0)]))
    assert found.mean_kl == pytest.approx(0.5 * math.log(3) / 2)
    assert found.p99_kl == pytest.approx(0.99 * 0.5 * math.log(3))
    assert found.top1 == 0.5
