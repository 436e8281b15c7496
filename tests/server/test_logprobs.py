"""Shapes of the log-probabilities of both routes."""

import math

from octavo.engine.output_processor import TokenAlternative, TokenRecord
from octavo.server.logprobs import (
    LOWEST,
    CompletionLogprobs,
    LogprobStyle,
    chat_content,
    prompt_logprobs,
)

STYLE = LogprobStyle(num_top=2, as_token_ids=False, hidden_ids=frozenset({9}))


def alternative(token_id: int, text: str, logprob: float) -> TokenAlternative:
    return TokenAlternative(token_id, text, text.encode(), logprob)


def record(
    token_id: int,
    text: str,
    logprob: float = -1.0,
    top: tuple[TokenAlternative, ...] = (),
    raw: bytes | None = b"",
) -> TokenRecord:
    token_bytes = text.encode() if raw == b"" else raw
    return TokenRecord(token_id, text, token_bytes, logprob, rank=3, top=top)


TOP = (alternative(1, "a", -0.5), alternative(2, "b", -1.5), alternative(3, "c", -math.inf))


def test_d01_chat_lists_exactly_the_wanted_number() -> None:
    (entry,) = chat_content([record(7, "é", -3.0, TOP)], STYLE)
    assert entry == {
        "token": "é",
        "logprob": -3.0,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    (bare,) = chat_content([record(7, "é", -3.0, TOP)], LogprobStyle(0, False, frozenset()))
    assert bare["top_logprobs"] == []


def test_minus_infinity_is_sent_as_a_number() -> None:
    (entry,) = chat_content([record(7, "x", -math.inf)], STYLE)
    assert entry["logprob"] == LOWEST == -9999.0


def test_token_ids_instead_of_texts() -> None:
    style = LogprobStyle(num_top=1, as_token_ids=True, hidden_ids=frozenset({9}))
    (entry,) = chat_content([record(7, "x", -3.0, TOP)], style)
    assert entry["token"] == "token_id:7"
    assert entry["top_logprobs"][0]["token"] == "token_id:1"
    lists = CompletionLogprobs(style)
    lists.add([record(9, "<eos>", -3.0, TOP)])
    assert lists.take()["tokens"] == ["token_id:9"]


def test_d01_completions_add_the_chosen_token_to_the_best() -> None:
    lists = CompletionLogprobs(STYLE)
    lists.add([record(7, "x", -3.0, TOP), record(1, "a", -0.5, TOP)])
    assert lists.take() == {
        "tokens": ["x", "a"],
        "token_logprobs": [-3.0, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5, "x": -3.0}, {"a": -0.5, "b": -1.5}],
        "text_offset": [0, 1],
    }


def test_candidates_with_one_text_stay_apart() -> None:
    top = (alternative(240, "\ufffd", -0.5), alternative(159, "\ufffd", -1.0))
    lists = CompletionLogprobs(STYLE)
    lists.add([record(7, "x", -3.0, top)])
    assert lists.take()["top_logprobs"] == [{"\ufffd": -0.5, "token_id:159": -1.0, "x": -3.0}]


def test_offsets_count_split_characters_once_and_hidden_tokens_not_at_all() -> None:
    lists = CompletionLogprobs(STYLE)
    halves = [record(200, "\ufffd", raw=b"\xc3"), record(201, "\ufffd", raw=b"\xa9")]
    lists.add([record(5, "ab"), *halves, record(9, "<eos>"), record(6, "c")])
    taken = lists.take()
    assert taken["text_offset"] == [0, 2, 2, 3, 3]
    assert taken["tokens"] == ["ab", "\ufffd", "\ufffd", "", "c"]


def test_offsets_go_on_from_piece_to_piece() -> None:
    lists = CompletionLogprobs(STYLE)
    lists.add([record(5, "ab")])
    assert lists.take()["text_offset"] == [0]
    lists.add([record(6, "c")])
    assert lists.take()["text_offset"] == [2]


def test_a10_an_echoed_prompt_begins_with_null() -> None:
    lists = CompletionLogprobs(STYLE)
    lists.add_prompt(record(9, "<bos>"), [record(5, " War", -2.0, TOP), record(6, "saw")], "Warsaw")
    assert lists.take() == {
        "tokens": ["", "War", "saw"],
        "token_logprobs": [None, -2.0, -1.0],
        "top_logprobs": [None, {"a": -0.5, "b": -1.5, "War": -2.0}, {"saw": -1.0}],
        "text_offset": [0, 0, 3],
    }


def test_control_tokens_that_the_client_wrote_are_part_of_an_echo() -> None:
    lists = CompletionLogprobs(STYLE)
    lists.add_prompt(record(9, "<eos>"), [record(6, "c")], "<eos>c")
    taken = lists.take()
    assert taken["tokens"] == ["<eos>", "c"]
    assert taken["text_offset"] == [0, 5]


def test_prompt_logprobs_are_maps_by_id_with_ranks() -> None:
    assert prompt_logprobs([record(7, "x", -3.0, TOP), record(2, "b", -1.5, TOP)], 2) == [
        None,
        {
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "2": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
            "7": {"logprob": -3.0, "rank": 3, "decoded_token": "x"},
        },
        {
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "2": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        },
    ]


def test_only_one_leading_space_is_taken_away() -> None:
    lists = CompletionLogprobs(STYLE)
    lists.add_prompt(record(5, " "), [record(6, " "), record(7, " a")], "  a")
    taken = lists.take()
    assert taken["tokens"] == ["", " ", " a"]
    assert taken["text_offset"] == [0, 0, 1]
