"""Where results go: looked at before a run is paid for, written after it."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import click
import orjson


class OutputFile(click.Path):
    """A file to be written, refused while the options are read if it could not be.

    Its folder has to exist. With `suffixes` the name ends in one of them, in any case of letters.
    """

    def __init__(self, *suffixes: str) -> None:
        super().__init__(path_type=Path)
        self._suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's signature
        path = super().convert(value, param, ctx)
        assert isinstance(path, Path)
        if self._suffixes and path.suffix.lower() not in self._suffixes:
            self.fail(f"{str(path)!r} does not end in {' or '.join(self._suffixes)}", param, ctx)
        try:
            check_file(path)
        except OSError as error:
            self.fail(f"{str(path)!r} cannot be written: {error.strerror}", param, ctx)
        return path


def check_file(path: Path) -> None:
    """Make sure that `path` can be written; changes nothing. Raises OSError."""
    # A link that leads nowhere stays: what is tried is the file behind it.
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if target.exists():
        # Not opened: who reads a pipe would take its closing for the end.
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    target.touch(exist_ok=False)
    target.unlink()


def make_folder(path: Path) -> None:
    """Make sure that `path` is a folder that takes files, made if missing.

    Raises click.BadParameter, which names --result-dir.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise click.BadParameter(
            f"no file can be written to {str(path)!r}: {error.strerror}",
            param_hint="'--result-dir'",
        ) from error


def write_output(path: Path, content: bytes) -> None:
    """Write a result. Raises click.ClickException where the disk refuses it all the same."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error


def write_json(path: Path | None, value: object) -> None:
    """Write `value` to `path`, if one is given, and say so."""
    if path is not None:
        write_output(path, orjson.dumps(value, option=orjson.OPT_INDENT_2))
        click.echo(f"result written to {path}", err=True)
