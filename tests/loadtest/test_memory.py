"""The benchmarks of memory, small, and what they count."""

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from octavo.config.load import DType
from octavo.loadtest.cli import bench
from octavo.loadtest.memory import static_batching
from octavo.loadtest.memory.block_sizes import SIZES
from octavo.loadtest.memory.engine import CacheShape, ModelChoice, Run, make_engine, run
from octavo.loadtest.memory.group import memory
from octavo.loadtest.memory.occupancy import Occupancy, Sharing
from octavo.loadtest.memory.report import Goal, line
from octavo.loadtest.memory.throughput import compare_caching
from octavo.loadtest.memory.workload import conversation_lengths
from octavo.loadtest.workload import Prompt


@pytest.fixture
def null_model(random_llama_dir: Path) -> ModelChoice:
    return ModelChoice(str(random_llama_dir), DType.FLOAT32, weights=False)


def figures(directory: Path, command: str, **options: object) -> dict[str, float]:
    """Runs a benchmark; its lines by their names."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    model = ["--model", str(directory), "--dtype", "float32"]
    result = CliRunner().invoke(memory, [command, *model, *flags])
    assert result.exit_code == 0, result.output
    found = re.findall(r"^ *([^:\n]+): +(-?[\d,.]+)", result.output, re.MULTILINE)
    return {name: float(number.replace(",", "")) for name, number in found}


def test_lengths_are_log_normal_with_the_wanted_means() -> None:
    lengths = np.array(conversation_lengths(np.random.default_rng(3), 2000, 2048))
    assert lengths.mean(axis=0) == pytest.approx([220, 180], abs=1)
    # Half of a log-normal draw lies below the mean times exp(-sigma^2 / 2).
    assert np.median(lengths, axis=0) == pytest.approx([133, 131], rel=0.1)
    assert lengths.min() >= 4 and lengths.max() <= 1024


def test_waste_is_counted_in_every_step(null_model: ModelChoice) -> None:
    occupancy = Occupancy()
    engine = make_engine(null_model, CacheShape(256, 64, block_size=16, caching=False))
    run(engine, [Prompt(list(range(20)), 20, 3), Prompt(list(range(30, 35)), 5, 2)], occupancy)
    # After a step: 20 of 32 and 5 of 16 slots; then 21 of 32, and the other one has ended.
    assert (occupancy.used_slots, occupancy.wasted_slots) == (48 + 32, 23 + 11)
    assert (occupancy.running, occupancy.peak_running, occupancy.num_steps) == (3, 2, 3)
    assert occupancy.contiguous_waste(64) == pytest.approx(1 - 46 / 192)


def test_sharing_is_counted_per_table(null_model: ModelChoice) -> None:
    sharing = Sharing()
    engine = make_engine(null_model, CacheShape(256, 64, block_size=16))
    prompt = [Prompt(list(range(40)), 40, 2)]
    run(engine, prompt, sharing, {"n": 3, "temperature": 1.0, "seed": 0})
    # After the fork three tables hold the same three blocks; then all have ended.
    assert (sharing.held, sharing.unshared) == (3, 9)


def test_goals_are_compared() -> None:
    assert line("x", 3.5, " %", Goal(4, True, " %")).endswith("3.50 %  (goal: at most 4 %, met)")
    assert line("x", 2.0, "", Goal(3, False, "")).endswith("2  (goal: at least 3, MISSED)")


def test_waste(random_llama_dir: Path) -> None:
    sizes = {"num_prompts": 20, "cache_tokens": 4096, "max_model_len": 512}
    found = figures(random_llama_dir, "waste", **sizes)
    assert found["Requests"] == 20
    assert 0 < found["Wasted, paged"] < 10
    assert found["Wasted, 512 contiguous slots each (computed)"] > 30
    assert found["Requests at once, contiguous"] == 8


def test_sharing(random_llama_dir: Path) -> None:
    sizes = {"input_len": 40, "output_len": 20, "num_requests": 1, "num_system_requests": 4}
    sizes |= {"system_len": 64, "own_len": 8, "system_output_len": 4}
    found = figures(random_llama_dir, "sharing", **sizes)
    # Two of four blocks are the prompt's alone: at least that much is shared by all.
    assert found["8 choices (n=8), saved over all steps"] > 100 * (1 - (2 + 8 * 2) / (8 * 4)) - 1
    assert found["4 beams, saved over all steps"] > 30
    assert found["system prompt of 64 tokens, 4 requests, saved over all steps"] > 50


def test_prefix(random_llama_dir: Path) -> None:
    sizes = {"shared_len": 64, "own_len": 8, "output_len": 4, "num_prompts": 4, "rounds": 1}
    found = figures(random_llama_dir, "prefix", **sizes)
    assert found["Prompt tokens from the cache"] == pytest.approx(100 * 3 * 64 / (4 * 72), abs=0.01)
    rates = found["Tokens/s, caching"], found["Tokens/s, no caching"]
    assert found["Times as fast"] == pytest.approx(rates[0] / rates[1], rel=0.02, abs=0.01)


def test_zero_hits(random_llama_dir: Path) -> None:
    sizes = {"input_len": 40, "output_len": 4, "num_prompts": 4, "rounds": 1, "host_rounds": 2}
    found = figures(random_llama_dir, "zero-hits", **sizes)
    added, whole = (
        found[name] for name in ("Bookkeeping added to a round (ms)", "A round with the model (ms)")
    )
    share = 100 * added / (added + whole)
    # Milliseconds and per cent are printed with two digits after the point.
    rounding = 0.005 + 100 * 0.005 / whole
    assert found["Throughput lost by it"] == pytest.approx(share, rel=0.02, abs=2 * rounding)
    per_token = 1e6 * added / (4 * (40 + 4))
    assert found["Bookkeeping added to a token (ns)"] == pytest.approx(per_token, abs=60)


def test_caching_is_compared_over_the_same_tokens(null_model: ModelChoice) -> None:
    numbers = iter(range(10_000))

    def draw() -> list[Prompt]:
        shared = [next(numbers) % 90 for _ in range(32)]
        return [Prompt([*shared, number], 33, 5) for number in range(3)]

    pairs = list(compare_caching(null_model, CacheShape(512, 64, block_size=16), draw, rounds=2))
    assert len(pairs) == 2
    for pair in pairs:
        for one, num_cached in ((pair.cached, 2 * 32), (pair.uncached, 0)):
            assert (one.num_prompt_tokens, one.num_output_tokens) == (3 * 33, 3 * 5)
            assert one.num_cached_tokens == num_cached


def test_static(random_llama_dir: Path) -> None:
    sizes = {"num_prompts": 6, "scale": 0.05, "cache_tokens": 1024, "max_model_len": 256}
    found = figures(random_llama_dir, "static", **sizes)
    assert found["Rows of a static batch"] == 4
    assert found["Most requests at once, paged"] == 6
    assert found["Tokens asked for"] == pytest.approx(6 * 9, abs=6)


@pytest.mark.parametrize("faster", [DType.FLOAT32, DType.BFLOAT16])
def test_the_baseline_runs_in_the_precision_that_suits_it(
    monkeypatch: pytest.MonkeyPatch, faster: DType
) -> None:
    asked: list[tuple[int, int]] = []

    class Timed:
        def __init__(self, choice: ModelChoice, dtype: DType) -> None:
            self.seconds = 1.0 if dtype is faster else 2.0

        def run(self, prompts: list[Prompt], batch_size: int) -> Run:
            asked.extend((len(prompt.content), prompt.output_len) for prompt in prompts)
            return Run(seconds=self.seconds, num_output_tokens=batch_size)

    monkeypatch.setattr(static_batching, "StaticBatches", Timed)
    batch = [Prompt([7] * 40, 40, 40), Prompt([7] * 3, 3, 4)]
    assert static_batching.fastest_dtype(ModelChoice(), batch) is faster
    # An eighth of the lengths, after a start that is not timed.
    assert asked[:4] == [(5, 2), (1, 2), (5, 5), (1, 2)]


def test_block_sizes(random_llama_dir: Path) -> None:
    sizes = ["--num-prompts=24", "--num-timed-prompts=2", "--scale=0.1", "--max-model-len=512"]
    shared = ["--num-beginnings=3", "--beginning-len=200"]
    command = ["block-sizes", "--model", str(random_llama_dir), *sizes, *shared]
    result = CliRunner().invoke(memory, command)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if line.strip()[:1].isdigit()]
    assert [int(row[0]) for row in rows] == list(SIZES)
    waste, hits, entries = ([float(row[column]) for row in rows] for column in (1, 2, 3))
    assert waste == sorted(waste) and hits == sorted(hits, reverse=True)
    assert entries == [512 / size for size in SIZES]


def test_the_commands_are_part_of_bench() -> None:
    assert bench.commands["memory"] is memory
