"""Beams as sequences: blocks shared, rows kept, stopped and resumed together. Block size 4."""

import pytest
from engine_harness import Harness, Sizes
from simulated_model import continuations, fingerprints, solo_beams

from octavo.engine.core.errors import ContextLengthError, InvalidRequestError


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + number) % 997 for number in range(length)]


def add_beams(harness: Harness, name: str, ids: list[int], **options: object) -> list:
    params = harness.add(name, ids, **{"use_beam_search": True, "ignore_eos": False, **options})
    return solo_beams(ids, params, harness.limits.eos_token_ids)


def results(harness: Harness, name: str, n: int) -> list[tuple[list[int], float]]:
    last = [harness.choices[name, index].deltas[-1] for index in range(n)]
    return [(list(delta.token_ids), delta.score) for delta in last]


def check(harness: Harness, name: str, wanted: list[tuple[list[int], float]]) -> None:
    got = results(harness, name, len(wanted))
    assert [text for text, _ in got] == [text for text, _ in wanted]
    assert [score for _, score in got] == pytest.approx([score for _, score in wanted])


@pytest.mark.parametrize(("length", "max_tokens"), [(1, 1), (3, 9), (8, 6), (50, 12)])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_results_are_those_of_a_plain_search(length: int, max_tokens: int, width: int) -> None:
    harness = Harness(Sizes(eos_token_ids=(3, 700)))
    wanted = add_beams(harness, "a", prompt(length), n=width, max_tokens=max_tokens)
    harness.run()
    check(harness, "a", wanted)


def test_beams_share_the_prompt_and_copy_only_what_they_write() -> None:
    harness = Harness(Sizes(num_blocks=64))
    add_beams(harness, "a", prompt(30), n=4, max_tokens=4)
    harness.step()
    harness.step()
    # Seven full blocks of the prompt and, in each beam, the one that it writes.
    tables = [row.block_ids for row in harness.executor.rows.values()]
    assert len({block_id for table in tables for block_id in table}) == 7 + 4
    assert len(harness.plan.block_copies) == 3
    harness.run()


def test_a_search_keeps_rows_for_all_its_beams() -> None:
    harness = Harness(Sizes(max_num_seqs=5, max_num_batched_tokens=16))
    add_beams(harness, "a", prompt(40), n=4, max_tokens=5)
    for name in "bc":
        harness.add(name, prompt(3, 100), max_tokens=30)
    harness.step()
    assert [seq_id for seq_id, _ in harness.chunks] == [0, 1]
    while harness.reason("a") is None:
        harness.step()
        assert len(harness.executor.rows) <= 5
    harness.run()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [8, 64])
def test_f02_preempted_beams_resume_as_one(caching: bool, budget: int) -> None:
    sizes = Sizes(num_blocks=24, max_num_batched_tokens=budget, eos_token_ids=(3,))
    harness = Harness(sizes, prefix_caching=caching)
    wanted = {
        f"r{number}": add_beams(
            harness, f"r{number}", prompt(14, 60 * number), n=3, best_of=4, max_tokens=14
        )
        for number in range(4)
    }
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    for name, texts in wanted.items():
        check(harness, name, texts)


def test_beams_mix_with_choices_that_are_drawn() -> None:
    harness = Harness(Sizes(num_blocks=40, max_num_seqs=12, max_num_batched_tokens=24))
    wanted = add_beams(harness, "beams", prompt(20), n=4, max_tokens=15)
    harness.add("drawn", prompt(20), max_tokens=20, n=3, temperature=1.0, seed=1)
    harness.run()
    check(harness, "beams", wanted)


def test_no_token_is_an_answer_too() -> None:
    harness = Harness()
    harness.add("a", prompt(9), n=3, max_tokens=0, prompt_logprobs=0, use_beam_search=True)
    harness.run()
    assert results(harness, "a", 3) == [([], 0.0)] * 3
    assert {harness.reason("a", index) for index in range(3)} == {"length"}
    scored = harness.choices["a", 0].deltas[-1].prompt_logprobs
    assert scored is not None and len(scored) == 8


@pytest.mark.parametrize("steps", range(8))
def test_f07_a_search_can_be_aborted_at_any_moment(steps: int) -> None:
    harness = Harness(Sizes(num_blocks=24, max_num_batched_tokens=16))
    harness.add("other", prompt(20, 300), max_tokens=30)
    add_beams(harness, "a", prompt(30), n=3, max_tokens=6)
    for _ in range(steps):
        harness.step()
    harness.engine.abort("a")
    harness.engine.abort("a")
    harness.run()
    assert {harness.reason("a", index) for index in range(3)} <= {"abort", "length"}


def test_one_result_can_be_given_up() -> None:
    harness = Harness()
    wanted = add_beams(harness, "a", prompt(9), n=3, max_tokens=5)
    harness.step()
    harness.engine.abort("a", 1)
    harness.run()
    assert harness.reason("a", 1) == "abort"
    for index in (0, 2):
        assert harness.text("a", index) == wanted[index][0]


def test_a_failed_row_ends_the_whole_search_once() -> None:
    harness = Harness()
    ids = prompt(9)
    first = continuations(fingerprints(ids)[-1], 6, 1000)[0][0]
    add_beams(harness, "a", ids, n=3, max_tokens=5)
    harness.step()
    harness.executor.failing_token = continuations(fingerprints([*ids, first])[-1], 6, 1000)[0][0]
    harness.run()
    assert {harness.reason("a", index) for index in range(3)} == {"error"}


def test_searches_that_could_never_run_are_refused() -> None:
    harness = Harness(Sizes(num_blocks=20, max_num_seqs=4))
    with pytest.raises(InvalidRequestError):
        add_beams(harness, "wide", prompt(3), n=5, max_tokens=1)
    with pytest.raises(ContextLengthError):
        add_beams(harness, "long", prompt(8), n=4, max_tokens=20)
    add_beams(harness, "fits", prompt(8), n=4, max_tokens=16)
    harness.run()
