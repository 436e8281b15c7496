"""What the files of sentence-transformers say of embeddings."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from octavo.config.load import LoadConfig
from octavo.engine.core.errors import CheckpointError
from octavo.engine.core.pooling import EmbeddingSpec, Pooling
from octavo.engine.loader import hub, resolve_checkpoint
from octavo.engine.loader.embedding import read_embedding_spec

MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def write(directory: Path, modules: Any, pooling: Any = None, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if modules is not None:
        (directory / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


def modules(*kinds: str) -> list[dict[str, Any]]:
    paths = {"Pooling": "1_Pooling"}
    return [
        {"idx": place, "path": paths.get(kind, ""), "type": f"sentence_transformers.models.{kind}"}
        for place, kind in enumerate(kinds)
    ]


def test_without_files_the_default_holds(tmp_path: Path) -> None:
    assert read_embedding_spec(write(tmp_path, None), Pooling.LAST) == EmbeddingSpec()


def test_declared_pooling(tmp_path: Path) -> None:
    write(tmp_path, modules("Transformer", "Pooling", "Normalize"), MEAN)
    assert read_embedding_spec(tmp_path, Pooling.LAST).pooling is Pooling.MEAN


@pytest.mark.parametrize(
    ("kinds", "pooling", "text"),
    [
        (("Transformer", "Pooling", "Dense"), MEAN, "Dense"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (("Transformer", "Pooling"), {**MEAN, "pooling_mode_cls_token": True}, "exactly one"),
        (("Transformer", "Pooling"), {}, "none"),
        (("Transformer", "Pooling"), None, "no config.json"),
    ],
)
def test_steps_that_are_not_supported_stop_the_start(
    tmp_path: Path, kinds: tuple[str, ...], pooling: Any, text: str
) -> None:
    write(tmp_path, modules(*kinds), pooling)
    with pytest.raises(CheckpointError, match=text):
        read_embedding_spec(tmp_path, Pooling.LAST)


@pytest.mark.parametrize("damaged", [{}, [{}], [1], {"a": 1}])
def test_a_damaged_list_of_modules(tmp_path: Path, damaged: Any) -> None:
    if not damaged:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "modules.json").write_text("{")
    else:
        write(tmp_path, damaged)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        read_embedding_spec(tmp_path, Pooling.LAST)


@pytest.mark.parametrize(
    ("config", "dimensions"),
    [
        ({"matryoshka_dimensions": [64, 32]}, [32, 64]),
        ({"is_matryoshka": True, "hidden_size": 3}, [1, 2, 3]),
        ({"is_matryoshka": False}, []),
    ],
)
def test_dimensions(tmp_path: Path, config: dict[str, Any], dimensions: list[int]) -> None:
    spec = read_embedding_spec(write(tmp_path, None, **config), Pooling.LAST)
    assert list(spec.dimensions) == dimensions


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    write(tmp_path, None, model_type="llama", is_causal=False)
    with pytest.raises(CheckpointError, match="later tokens"):
        resolve_checkpoint(LoadConfig(model=str(tmp_path)))


def test_a_download_takes_the_pooling_and_no_other_subfolder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = ["config.json", "1_Pooling/config.json", "onnx/config.json", "onnx/model.safetensors"]
    taken: list[str] = []

    def fake(hub_id: str, *, allow_patterns: Any, ignore_patterns: Any, **_: Any) -> str:
        taken.extend(
            filter_repo_objects(
                files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fake)
    hub.download("org/model", LoadConfig(), weights=True)
    assert taken == ["config.json", "1_Pooling/config.json"]
