"""What importing a part may load. `lint-imports` checks the names; this checks what happens."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEAVY = ("torch", "triton", "transformers", "numba")


def loaded_by(*modules: str, of: tuple[str, ...]) -> set[str]:
    """Which of the packages `of` a fresh process has loaded after importing the modules."""
    code = f"import sys, {', '.join(modules)}; print(*(set({of!r}) & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(
            ("octavo.engine.scheduler.scheduler", "octavo.engine.cache.kv_cache_manager"),
            id="scheduling",
        ),
        pytest.param(("octavo.config.engine", "octavo.config.server"), id="config"),
        pytest.param(("octavo.server.cli", "octavo.server.commands"), id="command line"),
        pytest.param(("octavo.server.terminal.commands",), id="terminal client"),
        pytest.param(("octavo.loadtest.cli",), id="load test"),
    ],
)
def test_parts_that_start_without_the_models_libraries(modules: tuple[str, ...]) -> None:
    assert loaded_by(*modules, of=HEAVY) == set()


def test_the_port_answers_before_torch_is_imported() -> None:
    assert loaded_by("octavo.server.serve", of=("torch", "triton", "numba")) == set()


def test_engine_is_synchronous_and_without_http() -> None:
    # torch itself may load asyncio, so this looks at the libraries of the server's side.
    network = ("fastapi", "starlette", "uvicorn", "sse_starlette")
    assert loaded_by("octavo.engine.engine_loop", of=network) == set()


def test_every_kernel_folder_is_behind_the_door() -> None:
    # import-linter refuses names that do not exist, so each has to be added with its folder.
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (door,) = [c for c in contracts["contracts"] if c["name"] == "ops.py is the only door"]
    folders = {f"octavo.kernels.{path.parent.name}" for path in ROOT.glob("kernels/*/__init__.py")}
    assert folders == set(door["forbidden_modules"])
