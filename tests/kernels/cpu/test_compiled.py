"""Where compiled kernels are kept."""

import os
from pathlib import Path

from octavo.kernels.cpu.compiled import _remove_stale


def test_folders_that_nobody_used_lately_are_removed(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("kernels-a", "kernels-b", "other"))
    for folder in (old, new, other):
        folder.mkdir()
        (folder / "data").touch()
    for folder in (old, other):
        os.utime(folder, (0, 0))
    _remove_stale(tmp_path)
    assert not old.exists()
    assert new.exists()
    assert other.exists()
