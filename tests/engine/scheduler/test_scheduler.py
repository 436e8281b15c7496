"""Plans of single steps by exact seq_ids, tokens and block ids. Block size 4, budget 32."""

import pytest
from engine_harness import Harness, Sizes
from simulated_model import solo_text

from octavo.engine.core.scheduler_output import Fork, ScheduledSequence
from octavo.engine.scheduler.queue import MAX_PASSES


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + number) % 997 for number in range(length)]


def test_first_step_introduces_a_sequence_in_full() -> None:
    harness = Harness()
    harness.add("a", prompt(6), max_tokens=3)
    harness.step()
    (new,) = harness.plan.new_sequences
    assert (new.seq_id, new.index, new.num_computed_tokens) == (0, 0, 0)
    assert (new.token_ids, new.num_prompt_tokens) == (tuple(prompt(6)), 6)
    assert new.block_ids == (0, 1)
    assert harness.plan.scheduled == (ScheduledSequence(0, 6, 0, (), True),)


def test_later_steps_tell_only_what_is_new() -> None:
    harness = Harness()
    harness.add("a", prompt(7), max_tokens=4)
    items = []
    while harness.engine.has_work():
        harness.step()
        items += harness.plan.scheduled
    assert items[1:] == [
        ScheduledSequence(0, 1, 0, (), True),
        ScheduledSequence(0, 1, 2, (2,), True),
        ScheduledSequence(0, 1, 0, (), True),
    ]


def test_a_finished_sequence_is_removed_in_the_next_plan() -> None:
    harness = Harness()
    harness.add("a", prompt(3), max_tokens=1)
    harness.step()
    harness.add("b", prompt(3, 50), max_tokens=1)
    harness.step()
    assert harness.plan.removed_seq_ids == (0,)


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    harness = Harness()
    harness.add("a", prompt(70), max_tokens=1)
    sizes = []
    while harness.engine.has_work():
        harness.step()
        sizes += [item.num_tokens for item in harness.plan.scheduled]
    assert sizes == [32, 32, 6]
    assert [plan.scheduled[0].sample for plan in harness.executor.plans] == [False, False, True]


def test_long_prefill_threshold_caps_a_chunk() -> None:
    harness = Harness(long_prefill_token_threshold=10)
    harness.add("a", prompt(25), max_tokens=1)
    harness.step()
    assert harness.chunks == [(0, 10)]


def test_decodes_come_before_prefills_and_older_prefills_before_younger() -> None:
    harness = Harness()
    harness.add("a", prompt(100), max_tokens=1)
    harness.step()
    harness.add("b", prompt(100, 200), max_tokens=1)
    harness.add("c", prompt(3, 400), max_tokens=5)
    harness.step()
    assert harness.chunks == [(0, 16), (1, 8), (2, 3)]
    harness.step()
    assert harness.chunks == [(2, 1), (0, 16), (1, 15)]


def test_f15_streams_keep_their_pace_beside_a_prompt_of_many_chunks() -> None:
    harness = Harness(Sizes(num_blocks=600))
    for name in "ab":
        harness.add(name, prompt(3), max_tokens=100)
    harness.step()
    harness.add("long", prompt(1600, 5), max_tokens=1)
    for _ in range(50):
        names = [delta.request_id for delta in harness.step()]
        assert names[:2] == ["a", "b"]


def test_f15_a_short_newcomer_starts_beside_long_prompts() -> None:
    harness = Harness(Sizes(num_blocks=600))
    for number in range(3):
        harness.add(f"long{number}", prompt(700, 7 * number), max_tokens=1)
    for _ in range(5):
        harness.step()
    harness.add("short", prompt(10, 300), max_tokens=1)
    steps = 0
    while not harness.text("short"):
        harness.step()
        steps += 1
    assert steps <= 3


def test_f15_a_newcomer_gets_a_token_even_where_the_budget_equals_the_rows() -> None:
    harness = Harness(Sizes(num_blocks=300, max_num_seqs=4, max_num_batched_tokens=4))
    for name in "ab":
        harness.add(name, prompt(1), max_tokens=200)
    harness.step()
    harness.add("long", prompt(400, 9), max_tokens=1)
    harness.step()
    harness.add("short", prompt(1, 77), max_tokens=1)
    harness.step()
    assert harness.reason("short") == "length"


def test_f15_a_long_prompt_goes_on_in_a_steady_flow_of_short_ones() -> None:
    harness = Harness(Sizes(num_blocks=400))
    harness.add("long", prompt(640), max_tokens=1)
    solo_steps = 20
    for step in range(3 * solo_steps):
        harness.add(f"s{step}", prompt(8, 3 * step), max_tokens=2)
        harness.step()
    assert harness.reason("long") == "length"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [170, 400])
def test_f15_a_long_prompt_is_not_starved_by_a_flood_of_short_ones(
    num_blocks: int, overlap: bool
) -> None:
    # More arrives in every step than a step can compute, and in the smaller pool the long prompt
    # fits only after most of the short ones in front of it have gone.
    harness = Harness(Sizes(num_blocks=num_blocks), overlap=overlap)
    arrivals = iter(range(1000))

    def flood() -> None:
        for number in (next(arrivals) for _ in range(3)):
            harness.add(f"s{number}", prompt(16, 20 * number), max_tokens=4)
        harness.step()

    for _ in range(10):
        flood()
    params = harness.add("long", prompt(640, 7), max_tokens=1)
    num_steps = 0
    while not harness.reason("long"):
        flood()
        num_steps += 1
    assert harness.text("long") == solo_text(prompt(640, 7), params)
    # It waits for those that came before it, at two a step, and then gets half of each step of 32
    # tokens or more: alone it takes 20 steps.
    queued, solo_steps = 30 // 2, 640 // 32
    assert num_steps <= queued + 2 * solo_steps + 10
    # The short ones have not been starved for it either.
    assert len([key for key, choice in harness.choices.items() if choice.finish_reason]) > 30


def test_rows_are_bounded() -> None:
    harness = Harness(Sizes(max_num_seqs=2, max_num_batched_tokens=32))
    for name in "abc":
        harness.add(name, prompt(2), max_tokens=2)
    harness.step()
    assert harness.chunks == [(0, 2), (1, 2)]
    assert harness.engine.stats().num_waiting == 1


def test_admission_waits_until_the_whole_prompt_fits() -> None:
    harness = Harness(Sizes(num_blocks=20, max_num_batched_tokens=16))
    harness.add("a", prompt(40), max_tokens=30)
    harness.add("b", prompt(40, 100), max_tokens=1)
    harness.run()
    assert harness.engine.stats().num_preemptions == 0


def test_the_newest_is_preempted_and_comes_back_to_the_front() -> None:
    harness = Harness(Sizes(num_blocks=8))
    harness.add("a", prompt(12), max_tokens=12)
    harness.add("b", prompt(12, 50), max_tokens=12)
    harness.step()
    harness.add("c", prompt(24, 90), max_tokens=1)
    while harness.engine.stats().num_preemptions == 0:
        harness.step()
    assert harness.plan.removed_seq_ids == (1,)
    assert [item.seq_id for item in harness.plan.scheduled] == [0]
    harness.run()
    first_seen = [seq.seq_id for plan in harness.executor.plans for seq in plan.new_sequences]
    assert first_seen == [0, 1, 1, 2]


def test_an_older_sequence_is_never_preempted_for_a_younger_one() -> None:
    harness = Harness(Sizes(num_blocks=12, max_num_seqs=4))
    for number in range(4):
        harness.add(f"r{number}", prompt(8, 20 * number), max_tokens=30)
    while harness.engine.has_work():
        finished = {number for number in range(4) if harness.reason(f"r{number}")}
        harness.step()
        preempted = set(harness.plan.removed_seq_ids) - finished
        going_on = [item.seq_id for item in harness.plan.scheduled]
        assert all(victim > max(going_on) for victim in preempted)
    assert harness.engine.stats().num_preemptions > 0


def test_what_a_preempted_sequence_was_given_in_the_step_is_taken_back() -> None:
    # a's long prompt is computed a token at a time beside b's decodes, which are planned first.
    harness = Harness(Sizes(num_blocks=12, max_num_seqs=2, max_num_batched_tokens=2))
    harness.add("a", prompt(40), max_tokens=3)
    harness.step()
    harness.add("b", prompt(1, 50), max_tokens=30)
    while harness.engine.stats().num_preemptions == 0:
        assert not harness.text("a")
        harness.step()
    assert harness.chunks == [(0, 1)]
    assert harness.plan.removed_seq_ids == (1,)
    assert harness.engine.stats().last_step_tokens == 1
    harness.run()


def test_f15_later_ones_that_fit_pass_a_waiting_head_but_not_for_ever() -> None:
    harness = Harness(Sizes(num_blocks=20, max_num_batched_tokens=64))
    harness.add("running", prompt(16), max_tokens=40)
    harness.step()
    harness.add("head", prompt(60, 100), max_tokens=1)
    for number in range(3 * MAX_PASSES):
        harness.add(f"small{number}", prompt(2, 10 * number), max_tokens=1)
    while not harness.reason("head"):
        harness.step()
    passed = [name for name, _ in harness.choices if name.startswith("small")]
    assert len([name for name in passed if harness.reason(name)]) >= MAX_PASSES
    started = [seq.seq_id for plan in harness.executor.plans for seq in plan.new_sequences]
    assert started.index(1) == 1 + MAX_PASSES


def test_priority_decides_who_starts_and_who_is_preempted() -> None:
    harness = Harness(Sizes(num_blocks=8, max_num_seqs=2), scheduling_policy="priority")
    harness.add("low", prompt(12), max_tokens=12, priority=5)
    harness.add("high", prompt(12, 50), max_tokens=12, priority=-5)
    harness.step()
    assert harness.chunks == [(1, 12), (0, 12)]
    while harness.engine.stats().num_preemptions == 0:
        harness.step()
    assert harness.plan.removed_seq_ids == (0,)
    harness.run()


def test_fcfs_ignores_priority() -> None:
    harness = Harness()
    harness.add("low", prompt(2), max_tokens=1, priority=5)
    harness.add("high", prompt(2, 50), max_tokens=1, priority=-5)
    harness.step()
    assert harness.chunks == [(0, 2), (1, 2)]


def test_children_draw_from_the_row_that_ends_the_prompt_and_enter_afterwards() -> None:
    harness = Harness()
    harness.add("a", prompt(6), max_tokens=3, n=3, temperature=1.0, seed=1)
    harness.step()
    (item,) = harness.plan.scheduled
    assert item == ScheduledSequence(0, 6, 0, (), True, (Fork(1, 1), Fork(2, 2)))
    harness.step()
    plan = harness.plan
    assert [new.seq_id for new in plan.new_sequences] == [1, 2]
    assert [new.num_computed_tokens for new in plan.new_sequences] == [6, 6]
    # Sequence 0 and 1 copy the half filled block 1; the last holder keeps it.
    assert plan.block_copies == ((1, 2), (1, 3))
    assert plan.scheduled[0] == ScheduledSequence(0, 1, 1, (2,), True)
    assert [new.block_ids for new in plan.new_sequences] == [(0, 3), (0, 1)]


def test_children_without_a_row_wait_and_resume_from_the_prefix_cache() -> None:
    harness = Harness(Sizes(max_num_seqs=2))
    harness.add("a", prompt(10), max_tokens=3, n=3, temperature=1.0, seed=1)
    harness.run()
    late = [new for plan in harness.executor.plans for new in plan.new_sequences if new.seq_id == 2]
    assert [new.num_computed_tokens for new in late] == [8]
    assert [new.block_ids[:2] for new in late] == [(0, 1)]


def test_a_forked_prompt_finishes_whole_in_one_step_without_children_left() -> None:
    harness = Harness()
    harness.add("a", prompt(6), max_tokens=1, n=3)
    assert [delta.index for delta in harness.step()] == [0, 1, 2]
    assert not harness.engine.has_work()
