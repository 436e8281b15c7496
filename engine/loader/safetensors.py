"""Weights in safetensors files. Names and sizes are checked without importing torch."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from octavo.engine.core.errors import CheckpointError, is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # as the library has it
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def find_weights(directory: Path) -> "Callable[[], Iterator[tuple[str, Tensor]]]":
    """Return a reader of all tensors of the checkpoint in `directory`.

    An index decides which files count; without one it is model.safetensors, or else all
    safetensors files. Raises CheckpointError when a file is missing, damaged or cut off, when it
    lacks a tensor that the index places in it, or when only pickled weights exist.
    """
    index = directory / INDEX_NAME
    shards = _indexed_shards(index) if index.is_file() else _plain_shards(directory)
    for path, names in shards.items():
        _check(path, names)
    return lambda: _read(shards)


def _indexed_shards(index: Path) -> dict[Path, frozenset[str] | None]:
    """Each shard with the names that the index promises in it."""
    try:
        weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, set[str]] = {}
        for tensor, shard in weight_map.items():
            if Path(shard).name != shard:
                raise ValueError(shard)
            shards.setdefault(shard, set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a usable index; download the file again") from error
    missing = sorted(name for name in shards if not (index.parent / name).is_file())
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(shards)} weight files are missing, such as "
            f"{missing[0]}; download the model again"
        )
    return {index.parent / name: frozenset(names) for name, names in sorted(shards.items())}


def _plain_shards(directory: Path) -> dict[Path, frozenset[str] | None]:
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if files:
        return dict.fromkeys(files)
    pickled = sorted(file.name for pattern in _PICKLED for file in directory.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{directory}: the weights are pickled ({pickled[0]}), which may run code when loaded "
            "and is not supported; convert them to safetensors"
        )
    raise CheckpointError(f"{directory}: no weights (*.safetensors) in this directory")


def _check(path: Path, names: frozenset[str] | None) -> None:
    """Check that the file is whole and holds the tensors of these names."""
    try:
        tensors, num_bytes = _read_header(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the file is damaged or cut off; download it again"
        ) from error
    if path.stat().st_size != num_bytes:
        raise CheckpointError(
            f"{path}: the file is damaged or cut off, with {path.stat().st_size} of {num_bytes} "
            "bytes; download it again"
        )
    absent = sorted((names or frozenset()).difference(tensors))
    if absent:
        raise CheckpointError(f"{path}: lacks the tensor {absent[0]} that the index places in it")


def _read_header(path: Path) -> tuple[frozenset[str], int]:
    """Return the names of the tensors and the size that the file must have."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError(size)
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    ends = [tensor["data_offsets"][1] for tensor in header.values()]
    return frozenset(header), 8 + size + max(ends, default=0)


def _read(shards: Mapping[Path, frozenset[str] | None]) -> "Iterator[tuple[str, Tensor]]":
    for path, names in shards.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if names is None or name in names:
                        yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise CheckpointError(
                f"{path}: the file is damaged or cut off ({error}); download it again"
            ) from error
