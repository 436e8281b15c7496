"""The tokenizer in a GGUF file's metadata, written as tokenizer.json and tokenizer_config.json."""

import json
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_KEY = "tokenizer.ggml."
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type that matter here."""

    CONTROL = 3
    USER_DEFINED = 4


def _by_regex(pattern: str) -> Any:  # noqa: ANN401 - untyped library
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> Any:  # noqa: ANN401 - untyped library
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _gpt2() -> Any:  # noqa: ANN401 - untyped library
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


_PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    **dict.fromkeys(("default", "gpt-2"), _gpt2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _single_digits),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"),
        lambda: _by_regex(_LLAMA3_SPLIT),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), lambda: _by_regex(_QWEN2_SPLIT)),
    "tekken": lambda: _by_regex(_TEKKEN_SPLIT),
}
"""By the name in tokenizer.ggml.pre: how text is cut before the merges."""
_ADDING_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""Pre-tokenizers whose models expect BOS where the file does not say."""
_NORMALIZING = frozenset({"qwen2"})


def save_tokenizer(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write the tokenizer that `metadata` describes, chat template included.

    Raises ValueError for a kind that is not supported, LookupError for missing keys.
    """
    kind = metadata.get(f"{_KEY}model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ValueError(f"tokenizer {kind!r} is not supported; supported are gpt2 and llama")
    _add_tokens(tokenizer, metadata)
    named = _named_tokens(metadata)
    if named["bos_token"] is not None and _adds_bos(metadata):
        _prepend(tokenizer, named["bos_token"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
        **named,
    }
    present = {name: value for name, value in config.items() if value is not None}
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(present, indent=2, ensure_ascii=False), encoding="utf-8")


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get(f"{_KEY}pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"pre-tokenizer {pre!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in metadata[f"{_KEY}merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=_vocab(metadata), merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _NORMALIZING:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """BPE whose merges follow from the scores, with byte fallback, as Llama 2 has it."""
    vocab = _vocab(metadata)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, metadata[f"{_KEY}scores"]),
            unk_token=_named_tokens(metadata)["unk_token"],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = normalizers.Replace(" ", "▁")
    if metadata.get(f"{_KEY}add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        to_spaces.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(to_spaces)
    return tokenizer


def _merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All ways to join two tokens into a third, best score of the result first."""
    ranked = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(ranked)]


def _vocab(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(metadata[f"{_KEY}tokens"])}


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    types = metadata.get(f"{_KEY}token_type", ())
    typed = list(zip(metadata[f"{_KEY}tokens"], types, strict=False))
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in typed
            if kind == _TokenType.CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in typed
            if kind == _TokenType.USER_DEFINED
        ]
    )


def _named_tokens(metadata: Mapping[str, Any]) -> dict[str, str | None]:
    tokens = metadata[f"{_KEY}tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.get(f"{_KEY}{key}_token_id") for name, key in names.items()}
    return {
        f"{name}_token": None if token_id is None else tokens[token_id]
        for name, token_id in ids.items()
    }


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    default = metadata[f"{_KEY}model"] == "llama" or metadata.get(f"{_KEY}pre") in _ADDING_BOS
    return bool(metadata.get(f"{_KEY}add_bos_token", default))


def _prepend(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
