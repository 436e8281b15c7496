"""Tripwires on the size and shape of the code.

A number here may be raised where that makes the code clearer: in a commit of its own that says
why.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import octavo.config.engine
import octavo.config.server
from octavo.config.base import ConfigModel

ROOT = Path(__file__).parents[2]
PACKAGES = ("config", "engine", "kernels", "loadtest", "server")
# Unrolled loops, and arguments that have to be passed one by one to compiled code.
COMPILED = ("kernels/cpu/", "kernels/triton/")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 7
MAX_CONFIG_FIELDS = 90

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources() -> dict[str, str]:
    """Text of every module of the packages, by its path in the repository."""
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@cache
def trees() -> dict[str, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


def functions() -> Iterator[tuple[str, Function]]:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{path}:{node.lineno} {node.name}", node


def test_files_are_short() -> None:
    lines = {path: text.count("\n") for path, text in sources().items()}
    assert not {path: n for path, n in lines.items() if n > MAX_FILE_LINES}


def test_functions_are_short() -> None:
    long = {
        name: length
        for name, node in functions()
        if not name.startswith("kernels/")
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


def test_functions_have_few_parameters() -> None:
    many = {}
    for name, node in functions():
        if name.startswith(COMPILED):
            continue
        arguments = node.args
        names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
        count = len(names) + len(arguments.kwonlyargs) - (names[:1] in (["self"], ["cls"]))
        if count > MAX_PARAMETERS:
            many[name] = count
    assert not many


def test_configuration_stays_small() -> None:
    def fields(model: type[ConfigModel]) -> int:
        kinds = [field.annotation for field in model.model_fields.values()]
        return sum(
            fields(kind) if isinstance(kind, type) and issubclass(kind, ConfigModel) else 1
            for kind in kinds
        )

    total = fields(octavo.config.engine.EngineConfig) + fields(octavo.config.server.ServerConfig)
    assert total <= MAX_CONFIG_FIELDS


def test_no_global_statement() -> None:
    assert not [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]


def test_no_mixin() -> None:
    assert not [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "mixin" in node.name.lower()
    ]


def test_kernels_package_is_one_docstring() -> None:
    # transformers may take the folder for the public package of this name: nothing may run in it
    # and nothing may look like a version.
    body = trees()["kernels/__init__.py"].body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


def test_open_ends_name_an_issue() -> None:
    marker = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))")
    found = [
        f"{path}:{number}"
        for path, text in sources().items()
        for number, line in enumerate(text.splitlines(), start=1)
        if marker.search(line)
    ]
    assert not found
