"""The script for a GPU node, on CPU with tiny shapes: every part of it runs and reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels.triton.tiles import Tiles
from octavo.loadtest.gpu import check, speed
from octavo.loadtest.gpu.models import ModelFigures
from octavo.loadtest.gpu.shapes import DRY
from octavo.loadtest.gpu.speed import Figure
from octavo.loadtest.gpu.sweep import Swept
from octavo.loadtest.offline.ceilings import Ceilings

SCRIPT = Path(__file__).parents[2] / "loadtest" / "gpu_check.sh"


@pytest.mark.timeout(600)
def test_a_dry_run_checks_and_measures_everything(tmp_path: Path) -> None:
    output = tmp_path / "new" / "figures.json"
    # A file where it is started, with the name of a package that it needs.
    (tmp_path / "transformers.py").write_text("raise SystemExit('the wrong one')\n")
    run = subprocess.run(
        [SCRIPT, "--dry", "--output", output],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(output.read_text())
    assert result["ok"] and len(result["checks"]) > 12
    assert all(check["error"] <= check["limit"] for check in result["checks"])
    (model,) = result["models"]
    assert [decode["batch"] for decode in model["decodes"]] == list(DRY.model_batches)
    assert all(decode["step_ms"] > 0 for decode in model["decodes"])
    (peer,) = result["peers"]
    assert peer["tokens_per_second"] > 0
    assert sum("fp8" in check["name"] for check in result["checks"]) > 5
    names = [figure["name"].strip() for figure in result["kernels"]]
    for part in (
        "decode 3 x 40",
        "decode 3 x 40 fp8",
        "prefill 33",
        "linear 4",
        "norm 2",
        "draw 2",
    ):
        assert part in names
    for peer in ("torch SDPA 3 x 40", "torch SDPA 33", "torch flex 33", "torch linear 4"):
        assert peer in names
    shapes = len(DRY.swept_batches) * len(DRY.contexts) + len(DRY.prompts)
    assert len(result["tiles"]) == shapes
    assert all(tile["figure"] for swept in result["tiles"] for tile in swept["tiles"])
    assert "0 wrong" in run.stdout and "tiles decode 2 x 40" in run.stdout


def test_tiles_that_a_device_cannot_hold_are_left_out_of_the_choice() -> None:
    small, large = Tiles(16, 16, 4, 1), Tiles(128, 256, 8, 4)
    figure = Figure("decode", 3.0, 100.0, "GB/s", 0.5)
    assert Swept("decode", {large: None, small: figure}).best == (small, figure)
    assert Swept("decode", {large: None}).best is None


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks alone have something to do."""
    monkeypatch.setattr(check, "measure_kernels", lambda plan, ceilings: ())
    monkeypatch.setattr(check, "measure_rows", lambda plan, ceilings: ())
    monkeypatch.setattr(check, "sweep_tiles", lambda plan, ceilings: ())
    figures = ModelFigures("model", 1, 2, 3.0, (), ())
    monkeypatch.setattr(check, "measure_model", lambda plan, facts, ceilings: figures)
    monkeypatch.setattr(check, "_transformers", lambda plan, facts: 1.0)


@pytest.mark.usefixtures("nothing_else")
def test_a_wrong_kernel_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = [("attention", float("inf"), 0.1)]
    monkeypatch.setattr(check, "check_kernels", lambda plan: wrong)
    assert check.main(["--dry", "--output", str(tmp_path / "figures.json")]) == 1


@pytest.mark.usefixtures("nothing_else")
def test_a_part_that_fails_is_told_and_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(plan: object) -> None:
        raise RuntimeError("an illegal instruction")

    monkeypatch.setattr(check, "check_kernels", fail)
    output = tmp_path / "figures.json"
    assert check.main(["--dry", "--output", str(output)]) == 1
    result = json.loads(output.read_text())
    assert "an illegal instruction" in result["failed"]["checks"]
    assert result["models"] and result["peers"]


def test_a_peer_that_fails_costs_no_figure_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speed, "_sdpa", fail)
    monkeypatch.setattr(speed, "_flex", fail)
    figures = list(speed.measure_kernels(DRY, Ceilings(1, 1.0, 1.0, 1.0, "float32")))
    names = [figure.name for figure in figures]
    assert "decode 1 x 40" in names and "prefill 33" in names and "linear 4" in names
    assert not any("SDPA" in name or "flex" in name for name in names)
