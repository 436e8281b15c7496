import json
import math
from pathlib import Path

import numpy as np
import pytest

from octavo.loadtest.workload import (
    Lengths,
    Prefixes,
    Vocabulary,
    arrival_times,
    custom_prompts,
    prefix_repetition_prompts,
    random_prompts,
    sharegpt_prompts,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 50.0])
@pytest.mark.parametrize(("count", "rate"), [(1, 3.0), (40, 8.0), (1000, 0.5)])
def test_arrivals_end_at_count_over_rate(count: int, rate: float, burstiness: float) -> None:
    times = arrival_times(rng(), count, rate, burstiness)
    assert len(times) == count
    assert times[-1] == pytest.approx(count / rate)
    assert times == sorted(times)
    assert times[0] > 0


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    # A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.diff(arrival_times(rng(), 20_000, 5.0, burstiness), prepend=0.0)
        assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(rng(), 3, math.inf, 1.0) == [0.0, 0.0, 0.0]


def test_random_prompts_have_the_asked_lengths_and_ids() -> None:
    prompts = random_prompts(rng(), Vocabulary([5, 7, 9]), 20, Lengths(30, 4))
    for prompt in prompts:
        assert isinstance(prompt.content, list)
        assert len(prompt.content) == prompt.input_len == 30
        assert set(prompt.content) <= {5, 7, 9}
        assert prompt.output_len == 4
    assert len({tuple(prompt.content) for prompt in prompts}) == 20


def test_random_prompts_are_plain_json_integers() -> None:
    (prompt,) = random_prompts(rng(), Vocabulary(range(1000)), 1, Lengths(8, 1))
    assert json.loads(json.dumps(prompt.content)) == prompt.content


def test_spread_lengths_stay_within_their_share() -> None:
    pairs = list(Lengths(100, 10, spread=0.5).draw(rng(), 2000))
    inputs, outputs = zip(*pairs, strict=True)
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (5, 15)
    assert min(Lengths(1, 1, spread=0.9).draw(rng(), 50)) >= (1, 1)


def test_words_make_a_text_of_that_many_words() -> None:
    (prompt,) = random_prompts(rng(), Vocabulary.of_words(), 1, Lengths(12, 3))
    assert isinstance(prompt.content, str)
    assert len(prompt.content.split()) == prompt.input_len == 12


def test_same_seed_gives_the_same_prompts() -> None:
    first, again, other = (
        random_prompts(rng(seed), Vocabulary(range(500)), 5, Lengths(16, 4, 0.3))
        for seed in (3, 3, 4)
    )
    assert first == again != other


def test_prefixes_are_shared_equally_and_suffixes_are_not() -> None:
    prompts = prefix_repetition_prompts(rng(), Vocabulary(range(1000)), 12, Prefixes(3, 20, 5), 7)
    heads = [tuple(prompt.content[:20]) for prompt in prompts]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert len({tuple(prompt.content[20:]) for prompt in prompts}) == 12
    assert {(prompt.input_len, prompt.output_len) for prompt in prompts} == {(25, 7)}


def test_prefixes_work_with_words() -> None:
    prompts = prefix_repetition_prompts(rng(), Vocabulary.of_words(), 4, Prefixes(1, 6, 2), 1)
    assert len({" ".join(prompt.content.split()[:6]) for prompt in prompts}) == 1


def conversation(question: str, answer: str) -> dict[str, object]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": "x", "conversations": turns}


def test_sharegpt_takes_usable_first_turns(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    usable = conversation("q" * 40, "a" * 80)
    unusable = [
        conversation("q", "a" * 80),
        conversation("q" * 40, "a"),
        conversation("q" * 5000, "a" * 80),
        conversation("q" * 4000, "a" * 4400),
        {"id": "x", "conversations": [{"from": "human", "value": "q" * 40}]},
    ]
    path.write_text(json.dumps([*unusable, usable]))
    prompts = sharegpt_prompts(rng(), path, 3, None)
    assert [(p.content, p.input_len, p.output_len) for p in prompts] == [("q" * 40, 10, 20)] * 3
    assert sharegpt_prompts(rng(), path, 1, 64)[0].output_len == 64


@pytest.mark.parametrize("text", ["{", "[1]", '[{"conversations": [1, 2]}]', "[]"])
def test_a_file_that_is_not_sharegpt_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        sharegpt_prompts(rng(), path, 1, None)


def test_custom_prompts_keep_their_order_and_repeat(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "one", "output_tokens": 5}\n\n{"prompt": [1, 2], "output_tokens": 6}'
    )
    prompts = custom_prompts(path, 3, None)
    assert [(p.content, p.output_len) for p in prompts] == [("one", 5), ([1, 2], 6), ("one", 5)]
    assert [p.output_len for p in custom_prompts(path, 2, 9)] == [9, 9]


@pytest.mark.parametrize(
    "line", ['{"prompt": ""}', '{"text": "x"}', "x", '{"prompt": "x"}', "[]", '{"prompt": 1}']
)
def test_a_faulty_custom_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine", "output_tokens": 1}\n' + line)
    with pytest.raises(ValueError, match=r"mine\.jsonl, line 2: "):
        custom_prompts(path, 2, None)
