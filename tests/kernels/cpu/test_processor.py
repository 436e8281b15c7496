"""The forms of the tiles for processors with and without AVX-512."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from llvmlite import binding, ir
from numba.core import config

from octavo.kernels.cpu import processor
from octavo.kernels.cpu.numbers import BF16

_AVX2 = "+avx2,+fma,+f16c"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq"
_ROOT = Path(__file__).parents[3]


def _fresh(module: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A second copy of a module of the kernels, which the other modules don't see afterwards."""
    name = f"octavo.kernels.cpu.{module}"
    spec = importlib.util.spec_from_file_location(name, _ROOT / f"kernels/cpu/{module}.py")
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, copy)
    spec.loader.exec_module(copy)
    return copy


def _assembly(emit: str, cpu: str, features: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Machine code of a tile of four rows as `cpu` with `features` would run it."""
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    _fresh("processor", monkeypatch)
    int8_tile, tile = _fresh("int8_tile", monkeypatch), _fresh("tile", monkeypatch)
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 9)
    function = ir.Function(module, kind, "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    if emit == "int8":
        int8_tile.emit_int8_tile(builder, 4, function.args)
    else:
        tile.emit_tile(builder, BF16, 4, function.args)
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    parsed = binding.parse_assembly(str(module))
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu")
    return target.create_target_machine(cpu=cpu, opt=3).emit_assembly(parsed)


@pytest.mark.parametrize(
    ("cpu", "features", "instruction"),
    [
        ("haswell", _AVX2, "vpmaddwd"),
        ("alderlake", f"{_AVX2},+avxvnni", "vpdpwssd"),
        ("skylake-avx512", _AVX512, "vpmaddwd"),
        ("znver4", f"{_AVX512},+avx512vnni", "vpdpwssd"),
    ],
)
def test_int8_products_take_the_processors_instruction(
    cpu: str, features: str, instruction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = _assembly("int8", cpu, features, monkeypatch)
    assert instruction in assembly
    assert ("zmm" in assembly) == ("avx512f" in features)


@pytest.mark.parametrize(
    ("cpu", "features", "instruction"),
    [
        ("haswell", _AVX2, "vfmadd"),
        ("skylake-avx512", _AVX512, "vfmadd"),
        ("znver4", f"{_AVX512},+avx512bf16", "vdpbf16ps"),
    ],
)
def test_bfloat16_products_take_the_processors_instruction(
    cpu: str, features: str, instruction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = _assembly("bfloat16", cpu, features, monkeypatch)
    assert instruction in assembly
    assert ("zmm" in assembly) == ("avx512f" in features)


@pytest.mark.skipif(not processor.HAS_AVX512, reason="this processor has one form only")
def test_the_form_without_avx512_gives_the_same_results() -> None:
    """The tests of linear layers and attention, as a processor with AVX2 runs the kernels."""
    files = [f"tests/kernels/cpu/test_{name}.py" for name in ("linear", "int8_linear", "attention")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "bfloat16", *files],
        cwd=_ROOT,
        env={**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": _AVX2},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
