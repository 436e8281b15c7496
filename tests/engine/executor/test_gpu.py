"""What a start on a GPU measures and prepares, on a stand-in for stream and memory."""

import gc

import pytest
import torch
from fake_stream import FakeStream
from hf_pair import make_pair

from octavo.config.cache import CacheConfig
from octavo.engine.attention.metadata import KVCacheLayout
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.executor.gpu import GpuStart
from octavo.engine.worker.device_memory import MemorySum
from octavo.engine.worker.device_runner import DeviceRunner
from octavo.engine.worker.device_step import Bounds
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import RunnerLimits
from octavo.engine.worker.memory import CacheDemand, StepLimits, size_cache

GIB = 1024**3
SUM = MemorySum(
    total=100 * GIB,
    others=GIB,
    weights=60 * GIB,
    activations=3 * GIB,
    rows=GIB,
    graphs=2 * GIB,
)


class ScriptedMemory:
    """Numbers as a driver would give them: weights of 50, a small cache of 5, a step of 7."""

    def __init__(self) -> None:
        self.released = 0
        self.has_cache = False

    def free_and_total(self) -> tuple[int, int]:
        return 1000 - 50 - 5 * self.has_cache - 20, 1000

    def allocated(self) -> int:
        return 55 if self.has_cache else 50

    def peak(self) -> int:
        return 62

    def reserved(self) -> int:
        return 50

    def release(self) -> None:
        self.released += 1


def make_runner(num_blocks: int, stream: FakeStream) -> DeviceRunner:
    model = make_pair("llama").ours
    facts = model.config
    layout = KVCacheLayout(num_blocks, facts.num_kv_heads, 4, facts.head_dim, torch.float32)
    cache = KVCache(layout, facts.num_layers, torch.device("cpu"), num_host_blocks=2)
    limits = RunnerLimits(4, 64, facts.vocab_size, ())
    return DeviceRunner(model, cache, limits, stream, Bounds(32, 64))


def test_the_largest_step_is_measured_with_a_small_cache() -> None:
    memory = ScriptedMemory()
    start = GpuStart(memory, StepLimits(4, 32), 4, Bounds(32, 64), [])
    asked: list[int] = []

    def make(num_blocks: int) -> DeviceRunner:
        asked.append(num_blocks)
        memory.has_cache = True
        return make_runner(num_blocks, FakeStream())

    frozen = gc.get_freeze_count()
    measured = start.measure(make)
    assert asked == [4 * (8 // 4 + 1)]
    # Five rows with that of padding, a table of 16 blocks and 515 ids; counts are 2 bytes each.
    rows = 5 * (16 * 4 + 8 + 2 * 9 * 4 + 515 * 2)
    # The driver says that 75 of 1000 are taken; 50 of them are this process's own.
    assert measured == MemorySum(
        total=1000, others=25, weights=55, activations=62 - 55, rows=rows, graphs=0
    )
    assert gc.get_freeze_count() == frozen


@pytest.mark.parametrize(
    ("most_blocks", "advice"),
    [
        (7, "--max-num-batched-tokens 32 and --max-num-seqs 4; --max-num-batched-tokens 16 with "
            "--max-num-seqs 2 would do"),
        (0, "use a smaller model"),
    ],
)  # fmt: skip
def test_f17_a_step_that_does_not_fit_is_told_with_one_that_does(
    most_blocks: int, advice: str
) -> None:
    def make(num_blocks: int) -> DeviceRunner:
        if num_blocks > most_blocks:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_runner(num_blocks, FakeStream())

    start = GpuStart(ScriptedMemory(), StepLimits(4, 32), 4, Bounds(32, 64), [])
    with pytest.raises(ConfigurationError, match=advice):
        start.measure(make)


def test_the_largest_steps_have_all_rows_and_the_longest_context_beside_prompts() -> None:
    start = GpuStart(ScriptedMemory(), StepLimits(4, 32), 4, Bounds(32, 64), [])
    plans: list[SchedulerOutput] = []

    def make(num_blocks: int) -> DeviceRunner:
        runner = make_runner(num_blocks, FakeStream())
        execute = runner.execute
        runner.execute = lambda plan: (plans.append(plan), execute(plan))[1]  # type: ignore[method-assign]
        return runner

    start.measure(make)
    prompts, mixed = (plan for plan in plans if plan.new_sequences)
    assert [item.num_tokens for item in prompts.scheduled] == [8] * 4
    assert [item.num_tokens for item in mixed.scheduled] == [1] + [8] * 3
    # One place is left for the decode that follows.
    assert len(mixed.new_sequences[0].token_ids) == 63


def test_a_start_warms_up_and_freezes_what_is_there() -> None:
    start = GpuStart(ScriptedMemory(), StepLimits(4, 32), 4, Bounds(32, 64), [])
    runner = make_runner(16, FakeStream())
    try:
        assert start.prepare(runner) == 0
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_eager_starts_record_nothing() -> None:
    assert GpuStart.sizes_for(64, enforce_eager=True) == []
    assert GpuStart.sizes_for(4, enforce_eager=False) == [1, 2, 4]


def test_the_cache_gets_what_is_left_of_the_share() -> None:
    assert SUM.cache_budget(0.9) == 23 * GIB
    assert SUM.utilization_for(23 * GIB) == 0.9


def test_the_sum_says_where_the_memory_goes() -> None:
    text = SUM.describe(23 * GIB, 0.9)
    for part in (
        "100.00 GiB",
        "weights 60.00",
        "largest step 3.00",
        "rows of sequences 1.00",
        "KV cache 23.00",
    ):
        assert part in text
    assert "left free 10.00" in text and "--gpu-memory-utilization 0.9" in text


@pytest.mark.parametrize(
    ("cache_gib", "advice"),
    [
        (30, "--gpu-memory-utilization 0.97 would do"),
        (34, "--gpu-memory-utilization 1.00 with --enforce-eager"),
        (40, "7.00 GiB are missing"),
    ],
)
def test_f17_what_does_not_fit_is_told_with_flag_and_value(cache_gib: int, advice: str) -> None:
    assert advice in SUM.advice(cache_gib * GIB)


def test_f17_a_context_that_does_not_fit_names_the_share_that_holds_it() -> None:
    block = GIB // 10
    demand = CacheDemand(
        model_limit=100_000,
        max_num_seqs=8,
        bytes_per_block=block,
        free_bytes=SUM.cache_budget(1.0),
        budget_bytes=SUM.cache_budget(0.9),
        gpu=SUM,
    )
    # 300 blocks are 30 GiB, and 23 are granted.
    with pytest.raises(ConfigurationError, match=r"is 3680\. --gpu-memory-utilization 0\.97"):
        size_cache(CacheConfig(gpu_memory_utilization=0.9), 4800, demand)
    low = CacheDemand(100_000, 8, block, SUM.cache_budget(1.0), SUM.cache_budget(0.5), SUM)
    with pytest.raises(ConfigurationError, match=r"weights 60\.00.*utilization 0\.68 would do"):
        size_cache(CacheConfig(gpu_memory_utilization=0.5), 16, low)


def test_recordings_of_the_measurement_leave_nothing_behind_that_later_ones_need() -> None:
    stream = FakeStream()
    start = GpuStart(ScriptedMemory(), StepLimits(4, 32), 4, Bounds(32, 64), [1, 4])
    measured = start.measure(lambda num_blocks: make_runner(num_blocks, stream))
    assert measured.graphs > 0
    try:
        assert start.prepare(make_runner(16, stream)) == 2
    finally:
        gc.unfreeze()
