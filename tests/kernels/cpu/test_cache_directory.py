"""Where compiled kernels go when the usual places cannot be written."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from octavo.kernels.cpu import (
    activation,
    attention,
    compiled,
    gated_linear,
    linear,
    norm,
    sampling,
)


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


@pytest.fixture
def only_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, where no other place can be written."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "file" / "compiled.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_start_finds_the_temporary_folder_of_this_user(only_temporary: Path) -> None:
    found = Path(compiled.cache_directory.__wrapped__())
    assert found.parent == only_temporary / f"octavo-{os.getuid()}"
    assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    assert Path(compiled.cache_directory.__wrapped__()) == found


def test_a_temporary_folder_that_is_a_link_is_not_trusted(
    only_temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (only_temporary / "others").mkdir()
    (only_temporary / f"octavo-{os.getuid()}").symlink_to(only_temporary / "others")
    found = Path(compiled.cache_directory.__wrapped__())
    assert found.parent == only_temporary
    assert not any((only_temporary / "others").iterdir())
    assert "each start compiles them again" in caplog.text


def test_a_start_is_the_first_until_a_kernel_is_kept(
    only_temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = only_temporary / "kernels"
    monkeypatch.setattr(compiled, "cache_directory", lambda: str(folder))
    kept = folder / "cpu_1234"  # as Numba makes one for each folder of sources
    kept.mkdir(parents=True)
    assert compiled.is_first_start()
    (kept / "pool._work-90.py311.nbi").touch()
    assert not compiled.is_first_start()


def test_kernels_close_over_plain_values_only() -> None:
    """By these Numba finds a compiled kernel again; a function is another in each process."""
    kernels = {
        id(kernel): kernel
        for module in (activation, attention, gated_linear, linear, norm, sampling)
        for value in vars(module).values()
        for kernel in (value.values() if isinstance(value, dict) else [value])
        if isinstance(kernel, compiled.Kernel)
    }
    assert len(kernels) > 10
    for kernel in kernels.values():
        for cell in kernel._function.__closure__ or ():
            assert isinstance(cell.cell_contents, int), kernel._function
