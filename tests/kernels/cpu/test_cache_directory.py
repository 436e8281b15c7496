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


def test_g11_the_users_cache_folder_comes_after_that_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def refuse(folder: Path, *arguments: int, **options: bool) -> None:
        if "__pycache__" in folder.parts:
            raise OSError("read-only file system")
        make(folder, *arguments, **options)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "mkdir", refuse)

    assert Path(compiled.cache_directory.__wrapped__()).parent == tmp_path / "octavo"
