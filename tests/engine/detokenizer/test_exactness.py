"""Pieces put together against the decoding of everything at once, for any ids."""

import os.path
import random
from pathlib import Path

import pytest
from octavo_fixtures import (
    EOS_ID,
    IM_END_ID,
    TOKENIZERS,
    VOCAB_SIZE,
    byte_ids,
    make_word_tokenizer,
    token_id,
)

from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return load(tmp_path_factory.mktemp("tokenizer"), request.param)


def load(directory: Path, kind: str) -> Tokenizer:
    return Tokenizer.from_directory(TOKENIZERS[kind](directory))


def pieces_of(ids: list[str], text: Tokenizer) -> list[int]:
    return [text._backend.token_to_id(piece) for piece in ids]


def stream(tokenizer: Tokenizer, prompt, generated, sizes=None, **params) -> list[str]:
    """The texts given out when the tokens come in groups of `sizes` (one by one by default)."""
    params = SamplingParams(max_tokens=100, **params)
    detokenizer = Detokenizer(tokenizer, prompt, params)
    texts, start = [], 0
    for size in sizes or [1] * len(generated):
        end = start + size
        last = end >= len(generated)
        texts.append(detokenizer.append(generated[start:end], last=last).text)
        start = end
        if last:
            break
    return texts


def expected(tokenizer: Tokenizer, prompt, generated, skip_special_tokens=True) -> str:
    """transformers' formula: the decoding of all, without what the prompt's own begins with."""
    before = tokenizer.decode(prompt, skip_special_tokens)
    text = tokenizer.decode([*prompt, *generated], skip_special_tokens)
    return text[len(os.path.commonprefix([before, text])) :]  # noqa: RUF071


@pytest.mark.parametrize("limit", [24, 270, VOCAB_SIZE + 3])
@pytest.mark.parametrize("skip", [True, False])
def test_a03_any_ids_give_the_text_of_decoding_at_once(tokenizer, limit, skip):
    draw = random.Random(limit)
    for _ in range(300):
        prompt = [draw.randrange(limit) for _ in range(draw.randrange(9))]
        generated = [draw.randrange(limit) for _ in range(draw.randrange(1, 14))]
        sizes = [draw.randrange(1, 4) for _ in generated]
        texts = stream(tokenizer, prompt, generated, sizes, skip_special_tokens=skip)
        assert "".join(texts) == expected(tokenizer, prompt, generated, skip), (prompt, generated)


@pytest.mark.parametrize(
    "pieces",
    [
        ["▁Hello", "!", "▁I", "'", "m"],
        ["▁", "▁leading", "▁x"],
        ["a", "▁", "▁", "▁", "▁", "b"],
    ],
)
def test_a03_sentencepiece_spaces(tmp_path, pieces):
    tokenizer = load(tmp_path, "spm")
    prompt = tokenizer.encode("the world")
    generated = pieces_of(pieces, tokenizer)
    text = "".join(stream(tokenizer, prompt, generated))
    assert text == "".join(pieces).replace("▁", " ")


def test_a03_first_word_after_bos_has_no_space(tmp_path):
    tokenizer = load(tmp_path, "spm")
    generated = pieces_of(["▁Hello", "▁world"], tokenizer)
    assert stream(tokenizer, [1], generated) == ["Hello", " world"]


def test_a01_split_character(tmp_path):
    tokenizer = load(tmp_path, "byte_bpe")
    generated = [*byte_ids("🧡ď"), token_id("ok"), EOS_ID]
    texts = stream(tokenizer, byte_ids("a"), generated)
    assert texts == ["", "", "", "🧡", "", "ď", "ok", ""]


def test_a01_character_that_the_prompt_begins(tmp_path):
    tokenizer = load(tmp_path, "byte_bpe")
    first, *rest = byte_ids("日")
    assert "".join(stream(tokenizer, [first], [*rest, *byte_ids("!")])) == "日!"


def test_a01_invalid_bytes_wait_until_they_are_certain(tmp_path):
    tokenizer = load(tmp_path, "byte_bpe")
    assert stream(tokenizer, [], [0xE6, 0x97, ord("x")]) == ["", "", "\ufffdx"]
    assert stream(tokenizer, [], [0xE6, 0x97]) == ["", "\ufffd"]


def test_a01_byte_fallback_run_waits_for_its_end(tmp_path):
    tokenizer = load(tmp_path, "spm")
    run = [3 + byte for byte in "日".encode()]
    world = pieces_of(["▁world"], tokenizer)
    assert stream(tokenizer, [1], [*run, *world]) == ["", "", "", "日 world"]
    # One wrong byte makes all bytes of the run unreadable, as in transformers.
    assert stream(tokenizer, [1], [*run, 3 + 0xFF, *world])[-1] == "\ufffd" * 4 + " world"


def test_special_tokens_are_kept_on_request(tmp_path):
    tokenizer = load(tmp_path, "byte_bpe")
    generated = [*byte_ids("a"), IM_END_ID, token_id("</think>")]
    assert "".join(stream(tokenizer, [], generated)) == "a</think>"
    texts = stream(tokenizer, [], generated, skip_special_tokens=False)
    assert "".join(texts) == "a<|im_end|></think>"


def test_a10_pieces_join_to_the_text(tmp_path):
    tokenizer = load(tmp_path, "spm")
    generated = [*pieces_of(["▁Hello"], tokenizer), 3 + ord("\n"), *pieces_of(["▁I"], tokenizer)]
    detokenizer = Detokenizer(tokenizer, [1], SamplingParams(max_tokens=9))
    pieces = [detokenizer.append([token]).pieces for token in generated]
    assert pieces == [("Hello",), ("\n",), (" I",)]


@pytest.mark.parametrize("spaces", [True, False])
def test_spaces_between_special_tokens_are_those_of_decoding_at_once(tmp_path, spaces):
    words = Tokenizer.from_directory(make_word_tokenizer(tmp_path))
    draw = random.Random(5)
    for _ in range(200):
        prompt, generated = ([draw.randrange(6) for _ in range(length)] for length in (3, 9))
        whole = words.decode([*prompt, *generated], skip_special_tokens=False)
        texts = stream(
            words,
            prompt,
            generated,
            skip_special_tokens=False,
            spaces_between_special_tokens=spaces,
        )
        # Only the special tokens of this tokenizer have such brackets.
        at_once = whole if spaces else whole.replace("> <", "><")
        before = words.decode(prompt, skip_special_tokens=False)
        before = before if spaces else before.replace("> <", "><")
        assert before + "".join(texts) == at_once
