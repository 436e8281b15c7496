"""Blocks that a sliding window has left are given up, where all layers have one. Block size 4."""

import contextlib

import pytest
import torch
from engine_harness import Harness, Sizes
from hf_pair import Pair, make_pair, random_ids
from model_engine import ModelEngine
from simulated_model import solo_text

from octavo.engine.attention.metadata import AttentionMetadata
from octavo.engine.core.limits import HostMemory
from octavo.kernels import ops

WINDOW = 9


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + number) % 997 for number in range(length)]


def test_a_long_text_holds_its_window_only() -> None:
    harness = Harness(Sizes(window=WINDOW))
    params = harness.add("a", prompt(30), max_tokens=60)
    most = 0
    while harness.engine.has_work():
        harness.step()
        if harness.text("a"):
            most = max(most, harness.engine.stats().num_used_blocks)
    # The window's 8 tokens before the next one touch three blocks; a fourth is written, and one
    # that was left goes when the next is full.
    assert most <= 4
    assert harness.text("a") == solo_text(prompt(30), params)


def test_choices_that_share_a_prompt_give_it_up_together() -> None:
    harness = Harness(Sizes(window=WINDOW))
    params = harness.add("a", prompt(30), max_tokens=30, n=3, temperature=1.0, seed=2)
    for _ in range(25):
        harness.step()
    assert harness.engine.stats().num_used_blocks <= 3 * 4
    harness.run()
    for index in range(3):
        assert harness.text("a", index) == solo_text(prompt(30), params, index)


def test_f03_hits_on_what_was_given_up_are_right() -> None:
    harness = Harness(Sizes(window=WINDOW))
    for number in range(3):
        params = harness.add(f"r{number}", prompt(33), max_tokens=20)
        harness.run()
        assert harness.text(f"r{number}") == solo_text(prompt(33), params)
        cached = harness.choices[f"r{number}", 0].deltas[0].num_cached_tokens
        assert cached == (0 if number == 0 else 32)


def test_only_the_window_is_swapped() -> None:
    sizes = Sizes(num_blocks=12, window=WINDOW, host_memory=HostMemory(40), max_num_seqs=6)
    harness = Harness(sizes, preemption_mode="swap")
    expected = {}
    for number in range(6):
        ids = prompt(5, 50 * number)
        params = harness.add(f"r{number}", ids, max_tokens=40)
        expected[f"r{number}"] = solo_text(ids, params)
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_preemptions_by_swap > 0
    assert stats.num_swapped_out_blocks <= 4 * stats.num_preemptions_by_swap
    assert {name: harness.text(name) for name in expected} == expected


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair("mistral", sliding_window=WINDOW)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_texts_of_a_real_model_do_not_change(pair: Pair, mode: str) -> None:
    engine = ModelEngine(
        pair.ours,
        num_blocks=16,
        max_model_len=64,
        window=WINDOW,
        scheduler={"preemption_mode": mode},
        host_memory=HostMemory(100),
    )
    prompts = [random_ids(4 + number % 2, seed=number) for number in range(6)]
    for number, ids in enumerate(prompts):
        engine.add(f"r{number}", ids, max_tokens=30)
    engine.run()
    assert engine.engine.stats().num_preemptions > 0
    for number, ids in enumerate(prompts):
        pair.assert_greedy(ids, engine.text(f"r{number}"))


def test_a_model_with_windows_in_some_layers_frees_nothing_and_is_right() -> None:
    mixed = make_pair("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    assert set(mixed.ours.config.windows) == {None, WINDOW}
    engine = ModelEngine(mixed.ours)
    ids = random_ids(25, seed=3)
    engine.add("a", ids, max_tokens=30)
    engine.run()
    mixed.assert_greedy(ids, engine.text("a"))


@pytest.mark.parametrize("num_queries", [1, 6])
@pytest.mark.parametrize("reference", [True, False])
def test_what_the_window_has_left_does_not_count(reference: bool, num_queries: int) -> None:
    torch.manual_seed(0)
    length, size, null_block = 31, 16, 9
    keys, values = torch.randn(10, 2, 4, size), torch.randn(10, 2, 4, size)
    query = torch.randn(num_queries, 4, size)
    table = torch.arange(8, dtype=torch.int32).unsqueeze(0)
    left = table.clone()
    left[0, : (length - num_queries - WINDOW + 1) // 4] = null_block

    def attend(block_table: torch.Tensor) -> torch.Tensor:
        batch = AttentionMetadata(
            slot_mapping=torch.empty(0, dtype=torch.int64),
            block_tables=block_table,
            seq_lens=torch.tensor([length], dtype=torch.int32),
            query_start_loc=torch.tensor([0, num_queries], dtype=torch.int32),
            max_query_len=num_queries,
            max_seq_len=length,
        )
        return ops.paged_attention(query, keys, values, batch, size**-0.5, WINDOW)

    with ops.reference_only() if reference else contextlib.nullcontext():
        assert torch.equal(attend(left), attend(table))


def test_a_block_that_the_window_has_left_may_hold_nan_by_now(pair: Pair) -> None:
    # Freed blocks go to other sequences, and one of these may have failed with NaN.
    engine = ModelEngine(pair.ours, window=WINDOW)
    ids = random_ids(40, seed=1)
    engine.add("a", ids, max_tokens=30)
    while engine.engine.has_work():
        engine.step()
        held = {
            number
            for number, block in enumerate(engine.engine.block_map().blocks)
            if block.ref_count
        }
        for layer in engine.executor.kv_cache.layers:
            for block_id in set(range(64)) - held:
                layer.key[block_id] = layer.value[block_id] = torch.nan
    pair.assert_greedy(ids, engine.text("a"))
