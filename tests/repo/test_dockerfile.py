"""The Dockerfile, as far as it can be checked without a Docker engine."""

import importlib.util
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("steps", ROOT / ".ci" / "dockerfile_steps.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_step_is_known_and_the_wheel_goes_from_stage_to_stage(steps: ModuleType) -> None:
    build, final = steps.parse((ROOT / "Dockerfile").read_text())
    made = [command for name, rest in build.steps if name == "RUN" for command in [rest]]
    assert any("--wheel-dir /wheels" in command for command in made)
    assert any("/wheels/octavo-" in rest for name, rest in final.steps if name == "RUN")
    assert all(name != "COPY" for name, _ in final.steps), "the source is not in the image"


def test_the_image_serves_as_a_user_with_a_compiler_and_a_health_check(steps: ModuleType) -> None:
    final = dict(steps.parse((ROOT / "Dockerfile").read_text())[1].steps)
    assert json.loads(final["ENTRYPOINT"]) == ["octavo", "serve"]
    assert final["USER"] == "octavo" and final["VOLUME"] == "/cache"
    assert "gcc" in (ROOT / "Dockerfile").read_text() and "/health" in final["HEALTHCHECK"]


def test_paths_of_the_image_are_taken_below_the_target(steps: ModuleType, tmp_path: Path) -> None:
    runner = steps.Runner(tmp_path, ["/wheels", "/cache"])
    command = "pip install /wheels/octavo-*.whl --cache-dir /cache && ls /usr/wheels"
    expected = f"pip install {tmp_path}/wheels/octavo-*.whl --cache-dir {tmp_path}/cache"
    assert runner.inside(command) == f"{expected} && ls /usr/wheels"


def test_steps_run_in_order_with_the_variables_of_the_file(
    steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps.venv, "create", lambda *_, **__: None)
    (stage,) = steps.parse(
        "FROM python:3 AS one\n# a comment\nWORKDIR /build\nENV WORD=here \\\n    OTHER=/build/x\n"
        'RUN apt-get update && echo "$WORD $OTHER" > out\n'
    )
    monkeypatch.setitem(steps.SYSTEM, "apt-get", "")
    steps.Runner(tmp_path, ["/build"]).run(stage)
    assert (tmp_path / "build" / "out").read_text() == f"here {tmp_path}/build/x\n"


SERVER = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(int(sys.argv[1])))
http.server.HTTPServer(("", int(os.environ["OCTAVO_PORT"])), http.server.SimpleHTTPRequestHandler
    ).serve_forever()
"""


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([sys.executable, "-c", SERVER, "0"], None),
        ([sys.executable, "-c", SERVER, "3"], "stopped with 3"),
        (["false"], "does not become healthy"),
    ],
    ids=["healthy", "a bad end", "no start"],
)
def test_the_entry_point_is_held_to_the_health_check(
    steps: ModuleType, tmp_path: Path, entry: list[str], message: str | None
) -> None:
    check = dict(steps.parse((ROOT / "Dockerfile").read_text())[1].steps)["HEALTHCHECK"]
    command = json.loads(check[check.index("CMD ") + 4 :])
    (tmp_path / "health").touch()
    variables = {"PATH": f"{Path(sys.executable).parent}:$PATH"}
    failing = pytest.raises(SystemExit, match=message) if message else nullcontext()
    with failing:
        steps.serve_and_check(entry, command, tmp_path, variables)


def test_an_unknown_instruction_is_an_error(steps: ModuleType) -> None:
    with pytest.raises(ValueError, match="ONBUILD"):
        steps.parse("FROM x\nONBUILD RUN y\n")
