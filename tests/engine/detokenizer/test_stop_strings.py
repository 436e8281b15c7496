"""Stop strings: where the text ends, what is held back, which tokens count."""

import random

import pytest
from octavo_fixtures import byte_ids, token_id

from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(byte_bpe_dir) -> Tokenizer:
    return Tokenizer.from_directory(byte_bpe_dir)


def run(tokenizer, ids, stop, *, size=1, **params):
    """(texts, stop string, tokens used) with the ids given in groups of `size`."""
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(max_tokens=99, stop=stop, **params))
    texts, used = [], 0
    for start in range(0, len(ids), size):
        result = detokenizer.append(ids[start : start + size], last=start + size >= len(ids))
        texts.append(result.text)
        used += result.num_tokens_used
        if result.stop is not None:
            return texts, result.stop, used
    return texts, None, used


def ids_of(*tokens: str) -> list[int]:
    return [token_id(token) for token in tokens]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a04_stop_over_several_tokens_does_not_leak(tokenizer, size):
    ids = ids_of("D", "EF", "G", "HI", "J", "K")
    assert run(tokenizer, ids, ("DEFGHIJ",), size=size)[1:] == ("DEFGHIJ", 5)
    assert "".join(run(tokenizer, ids, ("DEFGHIJ",), size=size)[0]) == ""


def test_a04_stop_across_token_borders_after_other_text(tokenizer):
    ids = ids_of("xy", "alpha ", "beta", " gam", "ma", " delta")
    texts, stop, used = run(tokenizer, ids, ("beta gamma",))
    assert texts == ["xy", "alpha ", "", "", ""]
    assert (stop, used) == ("beta gamma", 5)


def test_a04_held_text_comes_out_when_no_stop_follows(tokenizer):
    ids = ids_of("D", "EF", "x")
    assert run(tokenizer, ids, ("DEFGHIJ",)) == (["", "", "DEFx"], None, 3)


def test_a04_held_text_comes_out_at_the_end(tokenizer):
    assert run(tokenizer, ids_of("D", "EF"), ("DEFG",)) == (["", "DEF"], None, 2)


def test_a04_restart_inside_a_false_start(tokenizer):
    assert run(tokenizer, byte_ids("aaab!"), ("aab",)) == (["", "", "a", ""], "aab", 4)


@pytest.mark.parametrize(("include", "text"), [(False, "C"), (True, "CDE")])
def test_a06_stop_inside_a_token(tokenizer, include, text):
    ids = ids_of("C", "DEF", "G")
    texts, stop, used = run(tokenizer, ids, ("DE",), include_stop_str_in_output=include)
    assert ("".join(texts), stop, used) == (text, "DE", 2)


@pytest.mark.parametrize("stops", [("Y", "X"), ("X", "Y"), ("bYc", "X")])
def test_a06_earliest_match_counts(tokenizer, stops):
    texts, stop, _ = run(tokenizer, ids_of("aXbYc"), stops)
    assert (texts, stop) == (["a"], "X")


def test_d06_stop_is_not_looked_at_before_min_tokens(tokenizer):
    ids = byte_ids("a.bcd.e")
    texts, stop, used = run(tokenizer, ids, (".",), min_tokens=4)
    assert ("".join(texts), stop, used) == ("a.bcd", ".", 6)


def test_d06_stop_completed_after_min_tokens_counts(tokenizer):
    texts, stop, used = run(tokenizer, byte_ids("abcdef"), ("de",), min_tokens=4)
    assert ("".join(texts), stop, used) == ("abc", "de", 5)


def test_stop_in_text_that_the_end_makes_certain(tokenizer):
    texts, stop, used = run(tokenizer, [*byte_ids("a"), 0xE6], ("\ufffd",))
    assert ("".join(texts), stop, used) == ("a", "\ufffd", 2)


def test_grouping_of_tokens_changes_nothing(tokenizer):
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.choice(byte_ids("abc")) for _ in range(12)]
        stops = tuple({"".join(draw.choices("abc", k=draw.randint(2, 5))) for _ in range(3)})
        one = run(tokenizer, ids, stops)
        many = run(tokenizer, ids, stops, size=draw.randint(2, 12))
        assert ("".join(one[0]), *one[1:]) == ("".join(many[0]), *many[1:])
        place = [bytes(ids).decode().find(stop) for stop in stops]
        assert (one[1] is None) == all(at < 0 for at in place)
