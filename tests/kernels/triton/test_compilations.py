"""Where compiled kernels go."""

import logging
import os
from pathlib import Path

import pytest
from triton import knobs

from octavo.kernels.triton.compilations import use_writable_cache


def test_a_cache_that_can_be_written_is_used(tmp_path: Path) -> None:
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "new")
        use_writable_cache()
        assert knobs.cache.dir == str(tmp_path / "new")
        assert os.listdir(tmp_path / "new") == []


def test_a_cache_that_cannot_be_written_costs_a_compilation_and_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with knobs.cache.scope(), caplog.at_level(logging.WARNING):
        knobs.cache.dir = str(tmp_path / "file" / "cache")
        use_writable_cache()
        chosen = Path(knobs.cache.dir)
        assert chosen.parent == tmp_path and not any(chosen.iterdir())
    assert "TRITON_CACHE_DIR" in caplog.text
