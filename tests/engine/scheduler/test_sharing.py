"""Requests with the same uncached prefix that arrive together compute it once. Block size 4."""

import pytest
from engine_harness import Harness, Sizes
from simulated_model import solo_text


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + number) % 997 for number in range(length)]


def num_computed(harness: Harness) -> int:
    return sum(plan.num_tokens for plan in harness.executor.plans)


def test_a_prefix_that_arrives_often_is_computed_once() -> None:
    harness = Harness(Sizes(max_num_batched_tokens=200))
    expected = {}
    for number in range(6):
        ids = [*prompt(40), 500 + number, 7]
        params = harness.add(f"r{number}", ids, max_tokens=1)
        expected[f"r{number}"] = solo_text(ids, params)
    harness.step()
    assert harness.chunks == [(0, 42)]
    harness.step()
    assert harness.chunks == [(number, 2) for number in range(1, 6)]
    assert not harness.engine.has_work()
    assert num_computed(harness) == 42 + 5 * 2
    assert {name: harness.text(name) for name in expected} == expected


def test_the_follower_starts_at_the_block_where_it_differs() -> None:
    harness = Harness(Sizes(max_num_batched_tokens=16))
    harness.add("a", prompt(60), max_tokens=1)
    harness.add("b", [*prompt(12), *prompt(8, 500)], max_tokens=1)
    harness.step()
    # While it waits the leader's chunk stays half of the budget; three blocks are not there yet.
    assert harness.chunks == [(0, 8)]
    harness.step()
    assert harness.chunks == [(0, 8)]
    harness.step()
    assert harness.chunks == [(0, 8), (1, 8)]
    harness.run()
    assert num_computed(harness) == 60 + 8


def test_those_behind_a_held_sequence_go_on() -> None:
    harness = Harness(Sizes(max_num_batched_tokens=16, max_num_seqs=16))
    harness.add("a", prompt(40), max_tokens=1)
    for number in range(9):
        harness.add(f"same{number}", prompt(40), max_tokens=1)
    harness.add("other", prompt(3, 700), max_tokens=1)
    harness.step()
    assert harness.reason("other") == "length"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_when_the_writer_is_gone_the_follower_computes_the_rest(steps: int) -> None:
    harness = Harness(Sizes(max_num_batched_tokens=16))
    params = harness.add("a", prompt(60), max_tokens=1)
    harness.add("b", prompt(60), max_tokens=1)
    for _ in range(steps):
        harness.step()
    harness.engine.abort("a")
    harness.run()
    assert harness.text("b") == solo_text(prompt(60), params)
    assert num_computed(harness) == 60


def test_other_salts_and_whole_prompts_wait_for_nobody() -> None:
    harness = Harness(Sizes(max_num_batched_tokens=64))
    harness.add("a", prompt(12), max_tokens=1)
    harness.add("salted", prompt(12), max_tokens=1, cache_salt="x")
    harness.add("scored", prompt(12), max_tokens=1, prompt_logprobs=0)
    harness.step()
    assert harness.chunks == [(0, 12), (1, 12), (2, 12)]


def test_without_the_prefix_cache_nothing_waits() -> None:
    harness = Harness(Sizes(max_num_batched_tokens=64), prefix_caching=False)
    for name in "ab":
        harness.add(name, prompt(12), max_tokens=1)
    harness.step()
    assert harness.chunks == [(0, 12), (1, 12)]


@pytest.mark.parametrize(("length", "n"), [(37, 4), (48, 8), (100, 5)])
def test_choices_hold_their_prompt_once_and_their_own_tails(length: int, n: int) -> None:
    harness = Harness(Sizes(num_blocks=64, block_size=16, max_num_batched_tokens=128))
    harness.add("a", prompt(length), n=n, max_tokens=20, temperature=1.0, seed=1)
    harness.step()
    # All of them still share the last block, be it partly filled.
    assert harness.engine.stats().num_used_blocks == -(-length // 16)
    for num_output in range(1, 19):
        harness.step()
        num_own = -(-(length + num_output) // 16) - length // 16
        assert harness.engine.stats().num_used_blocks == length // 16 + n * num_own
    # The last one to write into the shared block needs no copy.
    copies = sum(len(plan.block_copies) for plan in harness.executor.plans)
    assert copies == (n - 1 if length % 16 else 0)
    harness.run()
