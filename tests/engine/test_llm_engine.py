"""The scheduling half as a whole over a simulated model: texts must equal those of solo runs.

Block size 4. The simulated executor checks every block table and every slot that is read.
"""

import pytest
from engine_harness import VOCAB_SIZE, Harness, Sizes
from simulated_model import solo_text

from octavo.engine.core.errors import ContextLengthError, InvalidRequestError
from octavo.engine.core.model_output import TokenLogprobs


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + number) % 997 for number in range(length)]


# Refusals


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [
        ([], InvalidRequestError),
        ([-1], InvalidRequestError),
        ([VOCAB_SIZE], InvalidRequestError),
        (prompt(32), ContextLengthError),
    ],
)
def test_f01_what_can_never_be_served_is_refused_at_the_door(
    token_ids: list[int], error: type[Exception]
) -> None:
    harness = Harness(Sizes(num_blocks=8))
    with pytest.raises(error):
        harness.add("a", token_ids, max_tokens=1)
    assert not harness.engine.has_work()


def test_f01_the_largest_request_that_fits_is_served_and_so_is_its_follower() -> None:
    harness = Harness(Sizes(num_blocks=8))
    harness.add("a", prompt(20), max_tokens=12)
    harness.add("b", prompt(4, 90), max_tokens=4)
    harness.run()
    assert len(harness.text("a")) == 12
    assert len(harness.text("b")) == 4


def test_f01_choices_that_do_not_fit_together_run_one_after_the_other() -> None:
    harness = Harness(Sizes(num_blocks=8))
    params = harness.add("a", prompt(19), max_tokens=12, n=4, temperature=1.0, seed=3)
    harness.run()
    for index in range(4):
        assert harness.text("a", index) == solo_text(prompt(19), params, index)


def test_an_open_id_is_refused() -> None:
    harness = Harness()
    harness.add("a", prompt(2), max_tokens=1)
    with pytest.raises(InvalidRequestError):
        harness.add("a", prompt(2), max_tokens=1)
    harness.run()
    harness.add("a", prompt(2), max_tokens=1)


# The end of a text. `script` makes the simulated model's text known before the request is made.


def script(length: int) -> list[int]:
    harness = Harness()
    params = harness.add("solo", prompt(5), max_tokens=length)
    return solo_text(prompt(5), params)


def test_length_ends_a_text() -> None:
    harness = Harness()
    harness.add("a", prompt(5), max_tokens=7)
    harness.run()
    assert (harness.text("a"), harness.reason("a")) == (script(7), "length")


def test_a_stop_id_is_the_last_id_and_is_named() -> None:
    ids = script(6)
    harness = Harness()
    harness.add("a", prompt(5), max_tokens=20, stop_token_ids=(ids[3],))
    harness.run()
    assert (harness.text("a"), harness.reason("a")) == (ids[:4], "stop")
    assert harness.choices["a", 0].deltas[-1].stop_reason == ids[3]


def eos_harness(eos: int) -> Harness:
    return Harness(Sizes(eos_token_ids=(eos,)))


def test_eos_ends_a_text_without_a_stop_reason() -> None:
    ids = script(6)
    harness = eos_harness(ids[2])
    harness.add("a", prompt(5), max_tokens=20, ignore_eos=False)
    harness.run()
    assert (harness.text("a"), harness.reason("a")) == (ids[:3], "stop")
    assert harness.choices["a", 0].deltas[-1].stop_reason is None


def test_eos_at_the_last_wanted_token_is_a_stop() -> None:
    ids = script(3)
    harness = eos_harness(ids[2])
    harness.add("a", prompt(5), max_tokens=3, ignore_eos=False)
    harness.run()
    assert harness.reason("a") == "stop"


def test_d06_ignore_eos_leaves_the_clients_stop_ids_in_force() -> None:
    ids = script(6)
    harness = eos_harness(ids[1])
    harness.add("a", prompt(5), max_tokens=20, ignore_eos=True, stop_token_ids=(ids[4],))
    harness.run()
    assert (harness.text("a"), harness.reason("a")) == (ids[:5], "stop")


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 3), (2, 3), (3, 6), (6, 6)])
def test_d06_an_end_token_counts_only_after_min_tokens(min_tokens: int, length: int) -> None:
    ids = script(6)
    harness = Harness()
    harness.add("a", prompt(5), max_tokens=6, min_tokens=min_tokens, stop_token_ids=(ids[2],))
    harness.run()
    assert len(harness.text("a")) == length


@pytest.mark.parametrize("n", [1, 3])
def test_b01_zero_tokens_are_an_answer_too(n: int) -> None:
    harness = Harness()
    harness.add("a", prompt(70), max_tokens=0, n=n, temperature=1.0)
    harness.run()
    assert [harness.text("a", index) for index in range(n)] == [[]] * n
    assert {harness.reason("a", index) for index in range(n)} == {"length"}


# Logprobs


def prompt_scores(harness: Harness, request_id: str) -> list[tuple[TokenLogprobs, ...] | None]:
    return [delta.prompt_logprobs for delta in harness.choices[request_id, 0].deltas]


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("length", [1, 9, 70])
def test_prompt_logprobs_come_once_whole_and_with_the_first_delta(
    length: int, max_tokens: int
) -> None:
    harness = Harness()
    for name in ("warm", "a"):
        harness.add(name, prompt(length), max_tokens=max_tokens, prompt_logprobs=0)
        harness.run()
    first, *later = prompt_scores(harness, "a")
    assert first is not None
    assert [score.token_id for score in first] == prompt(length)[1:]
    assert later == [None] * (len(later))
    assert harness.choices["a", 0].deltas[0].num_cached_tokens == 0


def test_f02_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    harness = Harness(Sizes(num_blocks=14, max_num_seqs=2, max_num_batched_tokens=2))
    harness.add("old", prompt(1, 50), max_tokens=50)
    harness.step()
    harness.add("a", prompt(30), max_tokens=2, prompt_logprobs=0)
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    first = prompt_scores(harness, "a")[0]
    assert first is not None
    assert [score.token_id for score in first] == prompt(30)[1:]


def test_each_generated_id_has_its_logprob() -> None:
    harness = Harness()
    harness.add("a", prompt(5), max_tokens=4, logprobs=0, n=2, temperature=1.0)
    harness.run()
    for index in range(2):
        deltas = harness.choices["a", index].deltas
        scores = [score.token_id for delta in deltas for score in delta.logprobs]
        assert scores == harness.text("a", index)


# Prefix cache


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12, 13])
def test_f03_a_repeated_prompt_gives_the_same_answer(length: int) -> None:
    harness = Harness()
    for number in range(3):
        params = harness.add(f"r{number}", prompt(length), max_tokens=6)
        harness.run()
        assert harness.text(f"r{number}") == solo_text(prompt(length), params)
        cached = harness.choices[f"r{number}", 0].deltas[0].num_cached_tokens
        assert cached == (0 if number == 0 else (length - 1) // 4 * 4)


def test_f05_only_equal_history_and_salt_share_blocks() -> None:
    harness = Harness()
    x, y, z = prompt(4), prompt(4, 50), prompt(4, 90)

    def num_cached(name: str, token_ids: list[int], salt: str | None = None) -> int:
        params = harness.add(name, token_ids, max_tokens=3, cache_salt=salt)
        harness.run()
        assert harness.text(name) == solo_text(token_ids, params)
        return harness.choices[name, 0].deltas[0].num_cached_tokens

    assert num_cached("xy", [*x, *y, 7]) == 0
    assert num_cached("zy", [*z, *y, 7]) == 0
    assert num_cached("yx", [*y, *x, 7]) == 0
    assert num_cached("salted", [*x, *y, 7], "salt") == 0
    assert num_cached("first token", [500, *x[1:], *y, 7]) == 0
    assert num_cached("fourth token", [*x[:3], 500, *y, 7]) == 0
    assert num_cached("xy again", [*x, *y, 8, 9]) == 8


def test_prefix_metrics_count_prompt_tokens_once() -> None:
    harness = Harness(Sizes(num_blocks=10))
    for name in "abc":
        harness.add(name, prompt(12), max_tokens=16)
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_preemptions > 0
    cached = sum(harness.choices[name, 0].deltas[0].num_cached_tokens for name in "abc")
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (36, cached)


def test_reset_waits_for_an_idle_engine() -> None:
    harness = Harness()
    harness.add("a", prompt(9), max_tokens=2)
    harness.step()
    assert not harness.engine.reset_prefix_cache()
    harness.run()
    assert harness.engine.reset_prefix_cache()
    harness.add("b", prompt(9), max_tokens=1)
    harness.run()
    assert harness.choices["b", 0].deltas[0].num_cached_tokens == 0


# Company, chunks and preemption


@pytest.mark.parametrize("budget", [8, 13, 64])
@pytest.mark.parametrize("caching", [False, True])
def test_f14_texts_depend_on_neither_length_chunks_nor_company(budget: int, caching: bool) -> None:
    sizes = Sizes(num_blocks=128, max_num_batched_tokens=budget)
    harness = Harness(sizes, prefix_caching=caching)
    expected = {}
    for length in range(1, 34):
        params = harness.add(f"r{length}", prompt(length), max_tokens=12)
        expected[f"r{length}"] = solo_text(prompt(length), params)
        harness.step()
    harness.run()
    assert {name: harness.text(name) for name in expected} == expected


def test_f02_preemption_is_invisible() -> None:
    harness = Harness(Sizes(num_blocks=40, max_num_seqs=12, max_num_batched_tokens=64))
    expected = {}
    for number in range(12):
        options = {"temperature": 1.0, "seed": number, "n": 1 + number % 3} if number % 2 else {}
        name, ids = f"r{number}", prompt(8, 40 * number)
        params = harness.add(name, ids, max_tokens=25, logprobs=0, **options)
        for index in range(params.n):
            expected[name, index] = solo_text(ids, params, index)
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    assert {key: choice.token_ids for key, choice in harness.choices.items()} == expected
    for choice in harness.choices.values():
        assert sum(len(delta.logprobs) for delta in choice.deltas) == 25


# Seeds


def drawn_seeds(seed: int | None, count: int = 3) -> list[int]:
    harness = Harness(seed=seed)
    for number in range(count):
        harness.add(f"r{number}", prompt(2, 9 * number), max_tokens=1, temperature=1.0)
    harness.step()
    return [new.seed for new in harness.plan.new_sequences]


def test_d03_unseeded_requests_differ_within_a_run_and_between_runs() -> None:
    assert len({*drawn_seeds(None), *drawn_seeds(None)}) == 6


def test_d03_a_configured_seed_fixes_the_draws() -> None:
    assert drawn_seeds(7) == drawn_seeds(7)
    assert len(set(drawn_seeds(7))) == 3


def test_d03_zero_is_a_seed() -> None:
    harness = Harness()
    harness.add("a", prompt(2), max_tokens=1, temperature=1.0, seed=0)
    harness.step()
    assert harness.plan.new_sequences[0].seed == 0


# Aborts and failures


def test_f07_abort_at_every_moment_of_a_request() -> None:
    for steps in range(12):
        harness = Harness(Sizes(max_num_batched_tokens=16))
        harness.add("a", prompt(60), max_tokens=8, n=3, temperature=1.0)
        for _ in range(steps):
            harness.step()
        open_before = [index for index in range(3) if harness.reason("a", index) is None]
        harness.engine.abort("a")
        harness.engine.abort("a")
        harness.engine.abort("unknown")
        harness.run()
        assert {harness.reason("a", index) for index in open_before} <= {"abort"}


def test_f07_a_preempted_request_can_be_aborted_while_it_waits() -> None:
    harness = Harness(Sizes(num_blocks=8))
    for number in range(2):
        harness.add(f"r{number}", prompt(12, 50 * number), max_tokens=12)
    while harness.engine.stats().num_preemptions == 0:
        harness.step()
    harness.engine.abort("r1")
    harness.run()
    assert (harness.reason("r0"), harness.reason("r1")) == ("length", "abort")


def test_abort_of_one_choice_leaves_the_others() -> None:
    harness = Harness()
    params = harness.add("a", prompt(5), max_tokens=6, n=3, temperature=1.0, seed=1)
    harness.step()
    harness.step()
    harness.engine.abort("a", 1)
    harness.engine.abort("a", 7)
    harness.run()
    assert [harness.reason("a", index) for index in range(3)] == ["length", "abort", "length"]
    assert harness.text("a", 2) == solo_text(prompt(5), params, 2)


@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_abort_of_one_choice_before_the_fork_leaves_the_others(aborted: int) -> None:
    harness = Harness(Sizes(max_num_batched_tokens=8))
    params = harness.add("a", prompt(30), max_tokens=6, n=3, temperature=1.0, seed=1)
    harness.step()
    harness.engine.abort("a", aborted)
    harness.run()
    for index in range(3):
        if index == aborted:
            assert (harness.text("a", index), harness.reason("a", index)) == ([], "abort")
        else:
            assert harness.text("a", index) == solo_text(prompt(30), params, index)


def test_a_failed_row_ends_its_own_request_only() -> None:
    harness = Harness()
    params = harness.add("good", prompt(5), max_tokens=8)
    harness.add("bad", prompt(5, 50), max_tokens=8)
    harness.step()
    harness.executor.failing_token = solo_text(prompt(5, 50), params)[3]
    harness.run()
    assert harness.text("good") == solo_text(prompt(5), params)
    assert len(harness.text("bad")) == 3
    last = harness.choices["bad", 0].deltas[-1]
    assert (last.finish_reason, last.error, last.token_ids) == ("error", "NaN logits", ())


def test_a_failed_row_at_the_fork_ends_every_choice_once() -> None:
    harness = Harness()
    params = harness.add("a", prompt(5), max_tokens=8, n=3)
    harness.executor.failing_token = solo_text(prompt(5), params)[0]
    harness.run()
    assert {harness.reason("a", index) for index in range(3)} == {"error"}


def test_a_failed_child_leaves_its_siblings() -> None:
    harness = Harness()
    params = harness.add("a", prompt(5), max_tokens=4, n=3, temperature=1.0, seed=5)
    harness.executor.failing_token = solo_text(prompt(5), params, 1)[0]
    harness.run()
    assert [harness.reason("a", index) for index in range(3)] == ["length", "error", "length"]


def test_starts_that_nobody_asks_for_are_forgotten() -> None:
    harness = Harness(Sizes(max_num_batched_tokens=8))
    harness.add("a", prompt(24), max_tokens=2)
    harness.step()
    harness.step()
    assert harness.engine.take_starts([]) == []


def test_context_end_is_a_length_end() -> None:
    harness = Harness(Sizes(num_blocks=8, max_model_len=10))
    harness.add("a", prompt(4), max_tokens=6)
    harness.run()
    assert (len(harness.text("a")), harness.reason("a")) == (6, "length")
