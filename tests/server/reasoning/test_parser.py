"""Splitting text into reasoning and answer, however it is cut into pieces."""

import random
from pathlib import Path
from typing import get_args

import pytest
from octavo_fixtures import END_THINK_ID, byte_ids, token_id
from octavo_serving import load_tokenizer

from octavo.config.server import ServerConfig
from octavo.server.reasoning.formats import FORMATS, Phase
from octavo.server.reasoning.parser import ReasoningParser
from octavo.server.reasoning.splitter import Reasoning

QWEN = FORMATS["qwen3"]
OPEN, MAYBE, SHUT = Phase.REASONING, Phase.UNDECIDED, Phase.ANSWER

SPLITS = [
    (OPEN, "abc</think>xyz", "abc", "xyz"),
    (OPEN, "\nabc\n\nd\n</think>\n\nxyz\n", "abc\n\nd", "xyz\n"),
    (OPEN, "<think>\nabc</think>xyz", "abc", "xyz"),
    (OPEN, "abc", "abc", ""),
    (OPEN, "abc \n", "abc \n", ""),
    (OPEN, "a < b </thin", "a < b </thin", ""),
    (OPEN, "a</thi</think>x", "a</thi", "x"),
    (OPEN, "</think>xyz", "", "xyz"),
    (OPEN, "abc</think>\n", "abc", ""),
    (MAYBE, "\n<think>abc</think>xyz", "abc", "xyz"),
    (MAYBE, " xyz</think>", "", " xyz</think>"),
    (MAYBE, "<thin ice", "", "<thin ice"),
    (MAYBE, " \n", "", " \n"),
    (SHUT, "  xyz <think>", "", "  xyz <think>"),
]


def split(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    parts = [parser.push(text, last=place == len(pieces) - 1) for place, text in enumerate(pieces)]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(("phase", "text", "reasoning", "content"), SPLITS)
def test_c08_the_cut_into_pieces_does_not_matter(
    phase: Phase, text: str, reasoning: str, content: str
) -> None:
    rng = random.Random(text)
    assert split(ReasoningParser(QWEN, phase), [text]) == (reasoning, content)
    assert split(ReasoningParser(QWEN, phase), [*text]) == (reasoning, content)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(ReasoningParser(QWEN, phase), pieces) == (reasoning, content)


def test_text_leaves_as_soon_as_it_is_certain() -> None:
    parser = ReasoningParser(QWEN, OPEN)
    given = [parser.push(text) for text in ("ab", "c </", "b", "</think>", "x")]
    assert given == [("ab", ""), ("c", ""), (" </b", ""), ("", ""), ("", "x")]


@pytest.mark.parametrize(
    ("name", "prompt", "kwargs", "phase"),
    [
        ("qwen3", "<|im_start|>assistant\n", {}, MAYBE),
        ("qwen3", "<|im_start|>assistant\n<think>\n", {}, OPEN),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", {}, SHUT),
        ("qwen3", "what is <think>?<|im_end|>\n<|im_start|>assistant\n", {}, MAYBE),
        ("deepseek_r1", "<assistant>", {}, OPEN),
        ("deepseek_r1", "<assistant></think>", {}, SHUT),
        ("deepseek_r1", "<assistant>", {"enable_thinking": False}, MAYBE),
        ("deepseek_r1", "<assistant>", {"thinking": False}, MAYBE),
        ("mistral", "hi[/INST]", {}, MAYBE),
    ],
)
def test_the_end_of_the_prompt_says_where_a_text_begins(
    name: str, prompt: str, kwargs: dict[str, bool], phase: Phase
) -> None:
    assert FORMATS[name].phase_after_prompt(prompt, kwargs) is phase


@pytest.mark.parametrize(
    ("text", "phase"),
    [("", MAYBE), ("\n", MAYBE), ("ab", SHUT), ("<think>ab", OPEN), ("<think>a</think>b", SHUT)],
)
def test_a_continued_message_says_where_a_text_begins(text: str, phase: Phase) -> None:
    assert QWEN.phase_after_message(text) is phase


def test_the_setting_names_all_formats() -> None:
    annotation = ServerConfig.model_fields["reasoning_parser"].annotation
    (names,) = (get_args(part) for part in get_args(annotation) if get_args(part))
    assert set(names) == set(FORMATS)


TOKENS = [token_id("abc"), *byte_ids(" \n"), token_id("</th"), token_id("ink>"), token_id("xyz")]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_tokens_up_to_the_closing_tag_are_reasoning(byte_bpe_dir: Path, size: int) -> None:
    tokenizer = load_tokenizer(byte_bpe_dir)
    splitter = Reasoning(QWEN, OPEN, tokenizer).splitter()
    total = 0
    for start in range(0, len(TOKENS), size):
        ids = TOKENS[start : start + size]
        output = splitter.push(tokenizer.decode(ids), ids, last=start + size >= len(TOKENS))
        total += output.num_tokens
    assert splitter.num_tokens == total == 5


def test_tokens_before_the_opening_tag_are_reasoning_too(byte_bpe_dir: Path) -> None:
    tokenizer = load_tokenizer(byte_bpe_dir)
    ids = [*byte_ids("\n"), token_id("<think>"), token_id("abc"), END_THINK_ID, token_id("xyz")]
    streamed, whole = (Reasoning(QWEN, MAYBE, tokenizer).splitter() for _ in range(2))
    for token in ids:
        streamed.push(tokenizer.decode([token]), [token], last=token == ids[-1])
    whole.push(tokenizer.decode(ids), ids, last=True)
    assert streamed.num_tokens == whole.num_tokens == 4
