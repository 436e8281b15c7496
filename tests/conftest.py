"""Fixtures for all tests: tokenizers and checkpoints, each made once per run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from octavo_fixtures import (
    make_byte_bpe_tokenizer,
    make_markov_checkpoint,
    make_random_checkpoint,
    make_spm_tokenizer,
    make_unigram_tokenizer,
)


@pytest.fixture(scope="session")
def byte_bpe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the byte-level BPE tokenizer."""
    return make_byte_bpe_tokenizer(tmp_path_factory.mktemp("byte_bpe"))


@pytest.fixture(scope="session")
def spm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the SentencePiece-style BPE tokenizer with byte fallback."""
    return make_spm_tokenizer(tmp_path_factory.mktemp("spm"))


@pytest.fixture(scope="session")
def unigram_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the Unigram tokenizer."""
    return make_unigram_tokenizer(tmp_path_factory.mktemp("unigram"))


@pytest.fixture(scope="session")
def random_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama checkpoint with random weights (two layers, grouped queries)."""
    return make_random_checkpoint(tmp_path_factory.mktemp("random_llama"))


@pytest.fixture
def markov_dir(tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkpoint with chosen next-token logits; arguments of `make_markov_checkpoint`."""
    made = 0

    def make(*args: Any, **kwargs: Any) -> Path:
        nonlocal made
        made += 1
        return make_markov_checkpoint(tmp_path / f"markov{made}", *args, **kwargs)

    return make
