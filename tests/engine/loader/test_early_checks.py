"""What a start finds wrong before it imports the libraries of models."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.config.load import LoadConfig
from octavo.engine.core.errors import CheckpointError
from octavo.engine.loader import check_local
from octavo.engine.loader.files import make_temporary_dir, remove_temporary_dirs


@pytest.fixture
def model_dir(random_llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_llama_dir, tmp_path / "model"))


def refusal(model: Path | str, **fields: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_local(LoadConfig(model=str(model), **fields))
    return str(caught.value)


def test_a_sound_model_passes(model_dir: Path) -> None:
    check_local(LoadConfig(model=str(model_dir)))
    check_local(LoadConfig(model=str(model_dir), tokenizer=str(model_dir)))
    check_local(LoadConfig(model="org/never-downloaded"))


def test_a_cut_weights_file_is_named(model_dir: Path) -> None:
    weights = model_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert f"{weights}: the file is damaged or cut off" in refusal(model_dir)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_weights_file_without_a_sound_header_is_named(model_dir: Path, content: bytes) -> None:
    weights = model_dir / "model.safetensors"
    weights.write_bytes(content)
    assert f"{weights}: the file is damaged" in refusal(model_dir)


def test_h04_a_tensor_that_the_index_names_in_vain(model_dir: Path) -> None:
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_tail": "model.safetensors"}}))
    assert "lacks the tensor lm_tail" in refusal(model_dir)


def test_a_missing_tokenizer_is_told(model_dir: Path, tmp_path: Path) -> None:
    for file in model_dir.glob("tokenizer*"):
        file.unlink()
    assert f"{model_dir}: no tokenizer" in refusal(model_dir)
    (tmp_path / "empty").mkdir()
    assert "empty: no tokenizer" in refusal(model_dir, tokenizer=str(tmp_path / "empty"))


def test_an_architecture_that_is_not_supported(model_dir: Path) -> None:
    config = model_dir / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "mamba"}))
    assert "mamba" in refusal(model_dir)


@pytest.mark.parametrize("content", [b"", b"GGML", b"<html>"])
def test_a_file_that_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    assert "m.gguf: not a GGUF file" in refusal(tmp_path / "m.gguf")


def test_nothing_slow_is_imported_for_it(model_dir: Path) -> None:
    code = (
        "import sys; from octavo.config.load import LoadConfig; "
        "from octavo.engine.loader import check_local; "
        f"check_local(LoadConfig(model={str(model_dir)!r})); "
        "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_temporary_directories_can_be_removed_at_once() -> None:
    path = make_temporary_dir()
    (path / "weights").write_text("x")
    remove_temporary_dirs()
    assert not path.exists()
    remove_temporary_dirs()
