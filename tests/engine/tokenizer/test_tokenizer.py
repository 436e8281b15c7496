"""The tokenizer against transformers' own."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from octavo_fixtures import (
    BOS_ID,
    EOS_ID,
    IM_END_ID,
    IM_START_ID,
    SPM_BOS_ID,
    THINK_ID,
    TOKENIZERS,
    make_byte_bpe_tokenizer,
    make_markov_checkpoint,
    token_id,
)
from transformers import AutoTokenizer

from octavo.engine.core.errors import CheckpointError
from octavo.engine.tokenizer import Tokenizer

TEXTS = ("hello world", "  Hello, World!\n\n x", "日本 🧡 é", "a<|im_end|>\n</s> b", "ab\0cd", "")


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_encodes_and_decodes_as_transformers(tmp_path, kind):
    path = TOKENIZERS[kind](tmp_path)
    ours, theirs = Tokenizer.from_directory(path), AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_facts_of_the_tokenizer(byte_bpe_dir):
    tokenizer = Tokenizer.from_directory(byte_bpe_dir)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)
    assert tokenizer.special_ids == {BOS_ID, EOS_ID, IM_START_ID, IM_END_ID}
    assert THINK_ID not in tokenizer.special_ids
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    assert tokenizer.chat_template is not None


def test_b07_nul_is_ordinary_text(byte_bpe_dir):
    tokenizer = Tokenizer.from_directory(byte_bpe_dir)
    assert tokenizer.decode(tokenizer.encode("ab\0cd")) == "ab\0cd"


def test_c01_completions_get_one_bos_by_default(tmp_path):
    tokenizer = Tokenizer.from_directory(make_byte_bpe_tokenizer(tmp_path, add_bos=True))
    assert tokenizer.encode("hello").count(BOS_ID) == 1
    assert BOS_ID not in tokenizer.encode("hello", add_special_tokens=False)


def test_saved_truncation_is_ignored(tmp_path):
    path = make_byte_bpe_tokenizer(tmp_path)
    saved = json.loads((path / "tokenizer.json").read_text())
    saved["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (path / "tokenizer.json").write_text(json.dumps(saved))
    assert len(Tokenizer.from_directory(path).encode("q" * 50)) == 50


def test_encoding_from_many_threads(byte_bpe_dir):
    tokenizer = Tokenizer.from_directory(byte_bpe_dir)
    texts = [f"hello {number} world" * 20 for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [tokenizer.encode(text) for text in texts]


def test_token_text_keeps_the_space_of_a_sentencepiece_token(spm_dir):
    tokenizer = Tokenizer.from_directory(spm_dir)
    ids = tokenizer.encode("the world", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)) == " the world"
    assert tokenizer.token_text(SPM_BOS_ID) == "<s>"


def test_token_bytes(byte_bpe_dir, spm_dir):
    byte_level = Tokenizer.from_directory(byte_bpe_dir)
    assert byte_level.token_bytes(0xF0) == b"\xf0"
    assert byte_level.token_bytes(token_id(" delta")) == b" delta"
    assert byte_level.token_bytes(EOS_ID) == b"<|eos|>"
    assert byte_level.token_bytes(10_000) is None
    spm = Tokenizer.from_directory(spm_dir)
    assert spm.token_bytes(3 + 0xE6) == b"\xe6"
    assert spm.token_bytes(spm.encode("the", add_special_tokens=False)[0]) == b" the"


def test_legacy_chat_template_file(tmp_path):
    path = make_byte_bpe_tokenizer(tmp_path, chat_template=None)
    assert Tokenizer.from_directory(path).chat_template is None
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 1 }}"}))
    assert Tokenizer.from_directory(path).chat_template == "{{ 1 }}"


def test_chat_template_jinja_file(tmp_path):
    path = make_byte_bpe_tokenizer(tmp_path, chat_template=None)
    (path / "chat_template.jinja").write_text("{{ 2 }}")
    assert Tokenizer.from_directory(path).chat_template == "{{ 2 }}"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer.json", None, "no tokenizer.json in this directory"),
        ("tokenizer.json", "{", "tokenizer.json: not readable as JSON"),
        ("tokenizer.json", "[]", "tokenizer.json: must hold a JSON object"),
        ("tokenizer.json", "{}", "tokenizer.json: no usable tokenizer .*is missing"),
        ("tokenizer.json", '{"added_tokens": []}', "tokenizer.json: no usable tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not readable as JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: must hold a JSON object"),
    ],
)
def test_a_missing_or_damaged_file_is_named(tmp_path, name, content, told):
    path = make_markov_checkpoint(tmp_path)
    (path / name).unlink()
    if content is not None:
        (path / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"{told}.*--tokenizer") as caught:
        Tokenizer.from_directory(path)
    assert str(path) in str(caught.value)


def test_missing_directory(tmp_path):
    with pytest.raises(CheckpointError, match="no such tokenizer directory"):
        Tokenizer.from_directory(tmp_path / "none")


def test_g11_no_network(byte_bpe_dir, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    Tokenizer.from_directory(byte_bpe_dir)


def test_special_tokens_that_are_text_all_the_same(byte_bpe_dir):
    tokenizer = Tokenizer.from_directory(byte_bpe_dir, visible=("<|im_end|>", "elsewhere"))
    assert tokenizer.special_ids == {BOS_ID, EOS_ID, IM_START_ID}


def test_templates_by_name(tmp_path):
    path = make_byte_bpe_tokenizer(tmp_path)
    extra = path / "additional_chat_templates"
    extra.mkdir()
    (path / "chat_template.jinja").write_text("D")
    (extra / "tool_use.jinja").write_text("T")
    assert Tokenizer.from_directory(path).chat_template == {"default": "D", "tool_use": "T"}
