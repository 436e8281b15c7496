"""The script for a GPU node, on CPU with tiny shapes: every part of it runs and reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.loadtest.gpu import check
from octavo.loadtest.gpu.shapes import DRY

SCRIPT = Path(__file__).parents[2] / "loadtest" / "gpu_check.sh"


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
    assert result["peers"]["transformers"] > 0
    assert "0 wrong" in run.stdout and "decode 3 x 40" in run.stdout


def test_a_wrong_kernel_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def one_wrong(plan: object) -> list[tuple[str, float, float]]:
        return [("attention", float("inf"), 0.1)]

    monkeypatch.setattr(check, "check_kernels", one_wrong)
    monkeypatch.setattr(check, "measure_kernels", lambda plan, ceilings: ())
    monkeypatch.setattr(check, "measure_models", lambda plan, ceilings: ())
    monkeypatch.setattr(check, "_transformers", lambda plan, facts: 1.0)
    assert check.main(["--dry", "--output", str(tmp_path / "figures.json")]) == 1
