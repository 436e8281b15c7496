"""Text to token ids and back, over the fast tokenizers of transformers."""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.engine.core.errors import CheckpointError

_GENERIC_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Values of tokenizer_class that say no more than "use tokenizer.json"."""

ChatTemplates = str | Mapping[str, str] | None


class Tokenizer:
    """A tokenizer loaded once and then only read; all methods may be called from any thread.

    `vocab_size` counts all tokens, added ones included; the model's own vocabulary may be padded
    beyond it. `special_ids` are the ids that `skip_special_tokens` leaves out. `special_tokens`
    maps names such as bos_token to their text, for chat templates. `chat_template` is one, several
    by name, or None.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - untyped library
        chat_template: ChatTemplates,
        visible: Collection[str] = (),
    ) -> None:
        """`visible` names special tokens that are text all the same."""
        self._backend = tokenizer.backend_tokenizer
        # A saved tokenizer may carry them; nothing is ever cut or filled up here.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.chat_template = chat_template
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.special_tokens: Mapping[str, str] = dict(tokenizer.special_tokens_map)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special and token.content not in visible
        )
        decoders = _decoder_types(self._backend)
        self.is_byte_level = decoders == ["ByteLevel"]
        self.has_byte_fallback = "ByteFallback" in decoders
        self._bytes_of_id: dict[int, bytes | None] = {}
        self._text_of_id: dict[int, str] = {}
        self._spaces_special = self._puts_spaces_between_special()
        self._anchor_ids, self._anchor_text = self._find_anchor()

    @classmethod
    def from_directory(cls, path: Path, visible: Collection[str] = ()) -> "Tokenizer":
        """Load the tokenizer in `path`, without any network; see `__init__` for `visible`.

        Raises CheckpointError when there is none, or it is damaged or has no fast version.
        """
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such tokenizer directory")
        try:
            tokenizer = _load(path)
        except Exception as error:  # the tokenizers library raises bare Exception for a bad file
            raise CheckpointError(
                f"{_find_fault(path, error)}; download it again, or name another tokenizer with "
                "--tokenizer"
            ) from error
        if not tokenizer.is_fast:
            raise CheckpointError(
                f"{path}: the tokenizer has no fast version (tokenizer.json); "
                "name another one with --tokenizer"
            )
        return cls(tokenizer, _chat_template(path, tokenizer.chat_template), visible)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of all of `text`; with the tokens that the tokenizer adds by itself."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of `ids`; ids beyond the vocabulary have none.

        Few tokenizers put a space between two special tokens; without
        `spaces_between_special_tokens` theirs is left out.
        The "clean up" of spaces that some old configurations ask for is never done.
        """
        parts: list[Sequence[int]] = [ids]
        if not (spaces_between_special_tokens or skip_special_tokens) and self._spaces_special:
            parts = self._between_special(ids)
        return "".join(
            self._backend.decode(part, skip_special_tokens=skip_special_tokens) for part in parts
        )

    def token_piece(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it; "" beyond the vocabulary."""
        return self._backend.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """Return the text that the token adds in the middle of a text, special tokens too.

        A token that is a part of a character gives U+FFFD; see `token_bytes`.
        """
        try:
            return self._text_of_id[token_id]
        except KeyError:
            text = self.decode([*self._anchor_ids, token_id], skip_special_tokens=False)
            return self._text_of_id.setdefault(token_id, text[len(self._anchor_text) :])

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that the token stands for; None beyond the vocabulary."""
        try:
            return self._bytes_of_id[token_id]
        except KeyError:
            return self._bytes_of_id.setdefault(token_id, self._find_bytes(token_id))

    @cached_property
    def longest_piece(self) -> int:
        """Characters of the longest token as the vocabulary spells it."""
        return max(len(self.token_piece(token_id)) for token_id in range(self.vocab_size))

    def fallback_byte(self, token_id: int) -> int | None:
        """Return the byte of a byte-fallback token such as <0x0A>; None for other tokens."""
        if not self.has_byte_fallback:
            return None
        return _parse_fallback(self.token_piece(token_id))

    def _find_bytes(self, token_id: int) -> bytes | None:
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return None
        if self.is_byte_level:
            return _byte_level_bytes(piece)
        byte = self.fallback_byte(token_id)
        return self.token_text(token_id).encode() if byte is None else bytes([byte])

    def _puts_spaces_between_special(self) -> bool:
        pair = list(self.special_ids)[:1] * 2
        return " " in self._backend.decode(pair, skip_special_tokens=False).strip(" ")

    def _between_special(self, ids: Sequence[int]) -> list[Sequence[int]]:
        """Cut between any two special tokens."""
        special = self.special_ids
        cuts = [place for place, pair in enumerate(pairwise(ids), 1) if special.issuperset(pair)]
        return [ids[start:end] for start, end in pairwise([0, *cuts, len(ids)])]

    def _find_anchor(self) -> tuple[list[int], str]:
        """An ordinary token to decode others after, since many decoders trim the first one."""
        anchor = self.encode("a", add_special_tokens=False)[-1:]
        return anchor, self.decode(anchor, skip_special_tokens=False)


def _load(path: Path) -> Any:  # noqa: ANN401 - untyped library
    # The server listens before it loads a model, and transformers takes a second to import.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    config = path / "tokenizer_config.json"
    declared = None
    if config.is_file():
        declared = json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class")
    if declared in _GENERIC_CLASSES:
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    # Finding the class of a model family imports a large part of transformers, for seconds.
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _decoder_types(backend: Any) -> list[str]:  # noqa: ANN401 - untyped library
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _chat_template(path: Path, template: ChatTemplates) -> ChatTemplates:
    legacy = path / "chat_template.json"
    if template is None and legacy.is_file():
        value = json.loads(legacy.read_text(encoding="utf-8")).get("chat_template")
        return value if isinstance(value, str) else None
    return template


def _find_fault(path: Path, error: Exception) -> str:
    """Return which file of the tokenizer in `path` is at fault, and what its fault is."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = path / name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if name == "tokenizer.json":
                return f"{path}: no tokenizer.json in this directory ({_first_line(error)})"
            continue
        except (OSError, ValueError, RecursionError) as fault:
            return f"{file}: not readable as JSON ({_first_line(fault)})"
        if not isinstance(content, dict):
            return f"{file}: must hold a JSON object"
    reason = f"the key {error} is missing" if isinstance(error, KeyError) else _first_line(error)
    return f"{path / 'tokenizer.json'}: no usable tokenizer ({reason})"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE, as GPT-2 defined it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    # A token with any character outside the alphabet is an added one, spelled as plain text.
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()


def _parse_fallback(piece: str) -> int | None:
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None
