"""Fixtures for all tests: tokenizers and checkpoints, each made once per run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch is imported: models of a few kilobytes gain nothing from threads, and threads that
# spin for work beside another busy process make each call a thousand times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from octavo_fixtures import (
    make_byte_bpe_tokenizer,
    make_markov_checkpoint,
    make_random_checkpoint,
    make_spm_tokenizer,
    make_unigram_tokenizer,
)

if TYPE_CHECKING:
    from octavo.engine.loader import Checkpoint


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


@pytest.fixture(scope="session")
def starter_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> "Checkpoint":
    """The starter model, converted into a cache of this run."""
    # Importing torch takes seconds that the tests of the scheduling half do without.
    from octavo.config.load import LoadConfig  # noqa: PLC0415
    from octavo.engine.loader import resolve_checkpoint  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return resolve_checkpoint(LoadConfig())


@pytest.fixture
def markov_dir(tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkpoint with chosen next-token logits; arguments of `make_markov_checkpoint`."""
    made = 0

    def make(*args: Any, **kwargs: Any) -> Path:
        nonlocal made
        made += 1
        return make_markov_checkpoint(tmp_path / f"markov{made}", *args, **kwargs)

    return make
