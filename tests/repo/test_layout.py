"""The import root, and what has to hold for a wheel to be complete."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parents[2]
PACKAGES = ("config", "engine", "kernels", "loadtest", "server")


def test_top_level_layout() -> None:
    files = ("pyproject.toml", "README.md", "LICENSE", "Makefile", "Dockerfile", ".ci/run")
    assert not [name for name in files if not (ROOT / name).is_file()]
    assert not [name for name in (*PACKAGES, "tests") if not (ROOT / name).is_dir()]


def test_import_root_holds_links_and_nothing_else() -> None:
    root = ROOT / ".src" / "octavo"
    entries = {path.name: path for path in root.iterdir() if path.name != "__pycache__"}
    assert set(entries) == {"__init__.py", "py.typed", *PACKAGES}
    for package in PACKAGES:
        assert entries[package].is_symlink()
        assert entries[package].readlink() == Path("../..") / package


@pytest.mark.parametrize("name", PACKAGES)
def test_folders_are_not_importable_by_their_bare_names(name: str) -> None:
    # A public package may have the name; one that is found in this repository must not.
    spec = find_spec(name)
    places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin])
    assert not [place for place in places if Path(place or "").resolve().is_relative_to(ROOT)]


def test_nothing_puts_the_root_on_the_path() -> None:
    assert not (ROOT / "conftest.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_folder_with_modules_is_a_package() -> None:
    # Others would be missing from the wheel, and only from the wheel.
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert not [str(path) for path in folders if not (path / "__init__.py").is_file()]


def test_packages_hold_only_modules() -> None:
    # The wheel takes no other file; one that is needed has to be named in package-data first.
    # Pages and examples are for readers of the repository.
    # So is the script that starts the check of a GPU from a clone.
    examples = (
        ROOT / "config" / "examples",
        ROOT / "loadtest" / "scenarios",
        ROOT / "loadtest" / "gpu_check.sh",
    )
    others = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".md")
        if "__pycache__" not in path.parts and not any(map(path.is_relative_to, examples))
    ]
    assert not others


def test_package_is_typed_and_documented() -> None:
    assert octavo.__doc__
    assert (Path(octavo.__file__).parent / "py.typed").is_file()
