"""The tokenizer in a GGUF file's metadata, saved as tokenizer.json and its companions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

_LINK = "model.gguf"

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


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# The name in tokenizer.ggml.pre, and how text is cut before the merges.
_PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2"), _gpt2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _single_digits),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"),
        lambda: _by_regex(_LLAMA3_SPLIT),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), lambda: _by_regex(_QWEN2_SPLIT)),
    "tekken": lambda: _by_regex(_TEKKEN_SPLIT),
}
_ADDING_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""Pre-tokenizers whose models expect BOS where the file does not say."""


def save_tokenizer(path: Path, metadata: Mapping[str, Any], directory: Path) -> None:
    """Write the tokenizer of the GGUF file `path` into `directory`.

    `metadata` needs only its scalar values. Raises ValueError for a kind that is not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer {model!r} is not supported; supported are gpt2 and llama")
    if model == "gpt2" and pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"pre-tokenizer {pre!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    # transformers takes a folder; the file's own may hold other tokenizer files that it would mix.
    link = directory / _LINK
    link.symlink_to(path.resolve())
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=_LINK, local_files_only=True)
    finally:
        link.unlink()
    backend = tokenizer.backend_tokenizer
    if model == "gpt2":
        backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in _ADDING_BOS)
    backend.post_processor = _post_processor(tokenizer, adds_bos)
    tokenizer.save_pretrained(directory)


def _post_processor(tokenizer: Any, adds_bos: bool) -> processors.TemplateProcessing:  # noqa: ANN401 - untyped library
    bos = tokenizer.bos_token
    if not adds_bos or bos is None:
        return processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.bos_token_id)],
    )
