"""Places of results, which are looked at before a run."""

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from octavo.loadtest.cli import bench
from octavo.loadtest.output import OutputFile, check_file, write_output

COMMANDS = [
    *(["latency", "--output-json"], ["throughput", "--output-json"]),
    *(["kernels", "--output-json"], ["quality", "--output-json"]),
    *(
        ["resilience", name, "--json"]
        for name in ("overload", "soak", "connections", "fuzz", "sigterm", "restart")
    ),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_file_without_a_folder_is_refused(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "missing" / "x.json"
    result = CliRunner().invoke(bench, [*command, str(path)])
    assert result.exit_code == 2
    assert f"Invalid value for '{command[-1]}': '{path}' cannot be written" in result.stderr


def test_looking_leaves_nothing_behind_and_keeps_what_is_there(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.write_text("old")
    link.symlink_to(tmp_path / "nowhere")
    for path in (kept, link, tmp_path / "new"):
        check_file(path)
    assert sorted(tmp_path.iterdir()) == [kept, link]
    assert kept.read_text() == "old"


def test_a_pipe_is_taken_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_file(tmp_path / "pipe")  # an open would wait for a reader


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        check_file(tmp_path)


@pytest.mark.parametrize("name", ["a.html", "a.HTM"])
def test_an_ending_counts_in_any_case_of_letters(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    assert OutputFile(".html", ".htm").convert(str(path), None, None) == path


def test_a_disk_that_refuses_a_result_is_told(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match=r"x cannot be written: No such file"):
        write_output(tmp_path / "gone" / "x", b"")
