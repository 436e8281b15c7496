"""Tiny tokenizers and checkpoints, made on the fly; every right value can be computed from them.

All tokenizers in `TOKENIZERS` have `VOCAB_SIZE` entries. In the byte-level one the id of a byte is
its value.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

VOCAB_SIZE = 515
"""Ids 0 to 514 in each of the tokenizers; on purpose not a multiple of 64."""

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
THINK_TOKENS = ("<think>", "</think>")
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID, THINK_ID, END_THINK_ID = range(509, 515)
"""Ids of the byte-level tokenizer's control tokens. `EOS_ID` and `IM_END_ID` both end a text."""

SPM_UNK_ID, SPM_BOS_ID, SPM_EOS_ID = 0, 1, 2
"""Ids of the SentencePiece-like and Unigram tokenizers' special tokens."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SCRIPT_TOKENS = (
    *("ok", "EF", "HI", "DEF", "aXbYc", "xy", "alpha ", "beta", " gam", "ma", " delta"),
    *("</th", "ink>", "abc", "xyz"),
)
"""Tokens that decode as they stand; no merge leads to them, so encoding never yields them."""

_WORDS = (
    *("hello", "world", " the", " and", " capital", " of", " France", " is", " Paris"),
    *("Warsaw", "What", "Answer", "user", "assistant", "system", " it", " you", " are", "ing"),
)
_LETTERS = "etaoinsrhldcum"


def _byte_alphabet() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in stand_ins)
    return stand_ins | {byte: chr(256 + place) for place, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _piece(text: str) -> str:
    return "".join(_BYTE_ALPHABET[byte] for byte in text.encode())


def _chain_merges(words: Iterable[str], vocab: dict[str, int], size: int) -> list[tuple[str, str]]:
    """Merges that build each word from the left; new pieces go into `vocab` up to `size`."""
    merges = []
    for word in words:
        for end in range(1, len(word)):
            left, right = word[:end], word[end]
            if len(vocab) == size or (left, right) in merges or right not in vocab:
                continue
            merges.append((left, right))
            vocab.setdefault(left + right, len(vocab))
    return merges


def _filler() -> Iterable[str]:
    return (first + second for first in _LETTERS for second in _LETTERS)


def byte_ids(text: str) -> list[int]:
    """One id of the byte-level tokenizer per UTF-8 byte of `text`."""
    return list(text.encode())


def _byte_vocab() -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocab = {piece: byte for byte, piece in sorted(_BYTE_ALPHABET.items())}
    for text in _SCRIPT_TOKENS:
        vocab[_piece(text)] = len(vocab)
    words = [_piece(word) for word in _WORDS]
    merges = _chain_merges([*words, *_filler()], vocab, VOCAB_SIZE - 6)
    assert len(vocab) == VOCAB_SIZE - 6
    return vocab, merges


def token_id(text: str) -> int:
    """Id of the one token of the byte-level tokenizer that decodes to `text`."""
    specials = (*SPECIAL_TOKENS, *THINK_TOKENS)
    if text in specials:
        return BOS_ID + specials.index(text)
    return _byte_vocab()[0][_piece(text)]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def _save_tokenizer(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    values |= {"model_max_length": 512} | config
    _write_json(
        directory / "tokenizer_config.json",
        {name: value for name, value in values.items() if value is not None},
    )
    return directory


def _add_bos(tokenizer: Tokenizer, bos: str, bos_id: int) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )


def make_byte_bpe_tokenizer(
    directory: Path, *, add_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Byte-level BPE as GPT-2 has it: 256 bytes, a few merges, four specials, two think tags."""
    vocab, merges = _byte_vocab()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in THINK_TOKENS])
    if add_bos:
        _add_bos(tokenizer, "<|bos|>", BOS_ID)
    return _save_tokenizer(
        directory, tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", chat_template=chat_template
    )


def _spm_pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocab = {"<unk>": SPM_UNK_ID, "<s>": SPM_BOS_ID, "</s>": SPM_EOS_ID}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for char in "▁" + "".join(map(chr, range(33, 127))) + "äé日本":
        vocab.setdefault(char, len(vocab))
    words = ("▁Hello", "▁leading", "▁world", "▁the", "▁I", "▁x", "▁capital", "▁▁▁▁", "ing")
    merges = _chain_merges([*words, *_filler()], vocab, VOCAB_SIZE)
    assert len(vocab) == VOCAB_SIZE
    return vocab, merges


def make_spm_tokenizer(
    directory: Path, *, add_bos: bool = True, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """SentencePiece-style BPE with byte fallback, arranged as Llama 2's tokenizer.json."""
    vocab, merges = _spm_pieces()
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _finish_sentencepiece(directory, tokenizer, add_bos, chat_template)


def make_unigram_tokenizer(
    directory: Path, *, add_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Unigram with Metaspace, as T5 and XLM-R have it; what it does not know becomes <unk>."""
    pieces, _ = _spm_pieces()
    scored = [
        (f"w{place}" if piece.startswith("<0x") else piece, -float(len(piece)) / 4 - place / 1000)
        for piece, place in pieces.items()
    ]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=SPM_UNK_ID))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _finish_sentencepiece(directory, tokenizer, add_bos, chat_template)


def make_word_tokenizer(directory: Path) -> Path:
    """Whole words and no decoder, so that a space stands between all tokens, special ones too."""
    words = ("<unk>", "<s>", "</s>", "one", "two", "three")
    vocab = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _finish_sentencepiece(directory, tokenizer, False, "{{ messages[0].content }}")


def _finish_sentencepiece(
    directory: Path, tokenizer: Tokenizer, add_bos: bool, chat_template: str | None
) -> Path:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    if add_bos:
        _add_bos(tokenizer, "<s>", SPM_BOS_ID)
    return _save_tokenizer(
        directory,
        tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=chat_template,
    )


TOKENIZERS: dict[str, Callable[..., Path]] = {
    "byte_bpe": make_byte_bpe_tokenizer,
    "spm": make_spm_tokenizer,
    "unigram": make_unigram_tokenizer,
}


def _ids_of(tokenizer: str) -> tuple[int, int, list[int]]:
    """BOS, EOS and all ids that end a text."""
    if tokenizer == "byte_bpe":
        return BOS_ID, EOS_ID, [EOS_ID, IM_END_ID]
    return SPM_BOS_ID, SPM_EOS_ID, [SPM_EOS_ID]


def script_table(script: Sequence[int], end_id: int = EOS_ID, gap: float = 20.0) -> np.ndarray:
    """Logits [V, V] under which greedy decoding emits `script` and then `end_id`.

    Any token outside the script leads to its first id. An id may not have two successors.
    """
    steps = dict(zip(script, [*script[1:], end_id], strict=True))
    if len(steps) != len(script):
        raise ValueError("an id of the script occurs twice; the next token depends on it alone")
    table = np.zeros((VOCAB_SIZE, VOCAB_SIZE), np.float32)
    for current in range(VOCAB_SIZE):
        table[current, steps.get(current, script[0])] = gap
    return table


def random_table(seed: int = 0, spread: float = 2.0) -> np.ndarray:
    """Logits [V, V], normally distributed."""
    drawn = np.random.default_rng(seed).normal(0, spread, (VOCAB_SIZE, VOCAB_SIZE))
    return drawn.astype(np.float32)


def make_markov_checkpoint(
    directory: Path,
    script: Sequence[int] | None = None,
    table: np.ndarray | None = None,
    *,
    tokenizer: str = "byte_bpe",
    max_position_embeddings: int = 512,
    generation_config: dict[str, Any] | None = None,
    **tokenizer_options: Any,
) -> Path:
    """A Llama checkpoint in fp32 whose logits after token t are exactly row t of `table`.

    The embedding is one-hot, attention and MLP add nothing, the final norm's weight undoes its
    scale. `script` is short for `script_table(script)`; with neither, the table is random.
    """
    bos_id, eos_id, eos_ids = _ids_of(tokenizer)
    if table is None:
        table = random_table() if script is None else script_table(script, eos_id)
    assert table.shape == (VOCAB_SIZE, VOCAB_SIZE)
    TOKENIZERS[tokenizer](directory, **tokenizer_options)
    size, heads, head_dim, inner, eps = VOCAB_SIZE, 5, 8, 32, 1e-6
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
    }
    _write_json(directory / "config.json", config)
    defaults = {"bos_token_id": bos_id, "eos_token_id": eos_ids} | (generation_config or {})
    _write_json(directory / "generation_config.json", defaults)
    rng = np.random.default_rng(1)
    layer = "model.layers.0."
    ones = np.ones(size, np.float32)
    weights = {
        "model.embed_tokens.weight": np.eye(size, dtype=np.float32),
        "model.norm.weight": ones * np.float32(np.sqrt(1 / size + eps)),
        "lm_head.weight": np.ascontiguousarray(table.T, np.float32),
        f"{layer}input_layernorm.weight": ones,
        f"{layer}post_attention_layernorm.weight": ones,
        f"{layer}self_attn.q_proj.weight": rng.normal(size=(heads * head_dim, size)),
        f"{layer}self_attn.k_proj.weight": rng.normal(size=(head_dim, size)),
        f"{layer}self_attn.v_proj.weight": rng.normal(size=(head_dim, size)),
        f"{layer}self_attn.o_proj.weight": np.zeros((size, heads * head_dim)),
        f"{layer}mlp.gate_proj.weight": rng.normal(size=(inner, size)),
        f"{layer}mlp.up_proj.weight": rng.normal(size=(inner, size)),
        f"{layer}mlp.down_proj.weight": np.zeros((size, inner)),
    }
    tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_random_checkpoint(
    directory: Path,
    family: str = "llama",
    seed: int = 0,
    *,
    tokenizer: str = "byte_bpe",
    max_shard_size: str = "1GB",
    **config_overrides: Any,
) -> Path:
    """A checkpoint of transformers' own making: random fp32 weights, two layers, real attention.

    `family` is a model_type; `config_overrides` go to its configuration class. The weights are
    large enough for greedy decoding to have clear winners.
    """
    # Importing them takes seconds that the tests of the scheduling half do without.
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    bos_id, eos_id, eos_ids = _ids_of(tokenizer)
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(family, **values | config_overrides)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # ones of norms and zeros of biases would hide a mix-up
                parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.set_rng_state(generator_state)
    model.generation_config.eos_token_id = eos_ids
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    TOKENIZERS[tokenizer](directory)
    return directory
