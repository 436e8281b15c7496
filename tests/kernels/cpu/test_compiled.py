"""Where compiled kernels are kept, and what their sources have to heed."""

import ast
import os
import re
from pathlib import Path

from octavo.kernels import cpu
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


def _arrays_let_go_early(source: str) -> list[str]:
    """Arrays made in functions of `source` that are not named by a last `keep_alive`."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        text = ast.unparse(function)
        made = re.findall(r"^ *(\w+) = np\.empty", text, re.MULTILINE)
        found += [name for name in made if f"keep_alive({name})" not in text]
    return found


def test_an_array_used_by_its_address_only_is_reported() -> None:
    code = "def f():\n    m = np.empty(3, np.int64)\n    g(m.ctypes.data)\n"
    assert _arrays_let_go_early(code) == ["m"]
    assert _arrays_let_go_early(code + "    keep_alive(m)\n") == []


def test_kernels_keep_their_memory_until_they_end() -> None:
    folder = Path(cpu.__file__).parent
    for path in folder.glob("*.py"):
        assert _arrays_let_go_early(path.read_text()) == [], path.name
