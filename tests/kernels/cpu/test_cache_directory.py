"""Where compiled kernels go when the usual places cannot be written."""

import tempfile
from pathlib import Path

import pytest

from octavo.kernels.cpu import compiled


def test_g11_a_temporary_folder_is_the_last_resort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "mkdir", refuse)
    found = Path(compiled.cache_directory.__wrapped__())

    assert found.parent == tmp_path and found.is_dir()
