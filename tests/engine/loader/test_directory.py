"""Directories in Hugging Face format: what loads, and what is refused with which words."""

import json
import logging
import socket
from pathlib import Path

import pytest
import torch
from octavo_fixtures import (
    EOS_ID,
    IM_END_ID,
    make_markov_checkpoint,
    make_random_checkpoint,
    script_table,
)
from safetensors.torch import load_file, save_file

from octavo.config.load import LoadConfig
from octavo.engine.core.errors import CheckpointError, ConfigurationError
from octavo.engine.loader import resolve_checkpoint
from octavo.engine.loader.filling import load_model

CPU = torch.device("cpu")


def resolve(path: Path, **fields):
    return resolve_checkpoint(LoadConfig(model=str(path), **fields))


def load(path: Path, **fields):
    return load_model(resolve(path, **fields), torch.float32, CPU)


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_weights(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def markov(tmp_path) -> Path:
    return make_markov_checkpoint(tmp_path / "model", script=[65, 66, 67])


@pytest.fixture
def sharded(tmp_path) -> Path:
    path = make_random_checkpoint(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def test_facts_of_a_directory(markov):
    checkpoint = resolve(markov)
    assert checkpoint.name == str(markov)
    assert checkpoint.tokenizer_dir == markov
    assert checkpoint.model_config.eos_token_ids == (EOS_ID, IM_END_ID)
    assert checkpoint.generation_defaults == {}


def test_weights_are_those_of_the_file(markov):
    weights = dict(resolve(markov).weights())
    table = torch.from_numpy(script_table([65, 66, 67]))
    assert torch.equal(weights["lm_head.weight"], table.T)


def test_d06_end_ids_are_joined_from_all_files(markov):
    edit_json(markov / "config.json", eos_token_id=3)
    edit_json(markov / "generation_config.json", eos_token_id=[4, 5])
    assert resolve(markov).model_config.eos_token_ids == (3, 4, 5, EOS_ID)


def test_sampling_defaults_come_from_the_generation_config(markov, tmp_path):
    edit_json(markov / "generation_config.json", temperature=0.5, top_k=7, do_sample=True)
    assert resolve(markov).generation_defaults == {"temperature": 0.5, "top_k": 7}
    assert resolve(markov, generation_config="none").generation_defaults == {}
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.25}')
    elsewhere = resolve(markov, generation_config=str(tmp_path))
    assert elsewhere.generation_defaults == {"top_p": 0.25}


def test_wrong_sampling_default_is_refused(markov):
    edit_json(markov / "generation_config.json", temperature="hot")
    with pytest.raises(CheckpointError, match="temperature must be a number"):
        resolve(markov)


def test_tokenizer_of_another_directory(markov, byte_bpe_dir):
    assert resolve(markov, tokenizer=str(byte_bpe_dir)).tokenizer_dir == byte_bpe_dir


def test_h04_shards_give_the_same_tensors_as_one_file(sharded, tmp_path):
    whole = make_random_checkpoint(tmp_path / "whole")
    one, many = dict(resolve(whole).weights()), dict(resolve(sharded).weights())
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_h04_missing_shard_is_named(sharded):
    shard = min(sharded.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        resolve(sharded)


def test_h04_index_that_names_an_absent_tensor(sharded):
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"model.extra": weight_map["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.extra"):
        load(sharded)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
)
def test_h04_damaged_index(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="not a usable index"):
        resolve(sharded)


def test_h04_the_index_decides_when_both_are_present(sharded):
    save_file({"wrong": torch.zeros(1)}, sharded / "model.safetensors")
    assert "wrong" not in dict(resolve(sharded).weights())


def test_h04_missing_tensor_is_named(markov):
    edit_weights(markov / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(markov)


def test_h04_wrong_shape_is_named(markov):
    def cut(tensors):
        tensors["model.norm.weight"] = torch.ones(3)

    edit_weights(markov / "model.safetensors", cut)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load(markov)


def test_h04_extra_tensor_is_a_warning(markov, caplog):
    edit_weights(markov / "model.safetensors", lambda tensors: tensors.update(stray=torch.ones(1)))
    with caplog.at_level(logging.WARNING):
        load(markov)
    assert "stray" in caplog.text


@pytest.mark.parametrize("keep", [0, 4, 1000, -5])
def test_truncated_weights_are_refused(markov, keep):
    path = markov / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*download it again"):
        load(markov)


def test_pickled_weights_are_refused(markov):
    (markov / "model.safetensors").rename(markov / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled.*convert them to safetensors"):
        resolve(markov)


def test_directory_without_weights(markov):
    (markov / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        resolve(markov)


def test_h02_quantized_weights_are_refused_by_name(markov):
    edit_json(markov / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match="gptq"):
        resolve(markov)


def test_missing_config(markov):
    (markov / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(markov)


@pytest.mark.parametrize("content", ["", "[1]", "{", '"x"', "\xff", "[" * 100_000])
def test_damaged_config(markov, content):
    (markov / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        resolve(markov)


def test_unsupported_architecture_lists_what_is_supported(markov):
    edit_json(markov / "config.json", model_type="mamba")
    with pytest.raises(CheckpointError, match=r"config\.json.*mamba.*llama.*embeddings.* bert"):
        resolve(markov)


def test_dummy_weights_need_no_file(markov):
    (markov / "model.safetensors").unlink()
    load(markov, load_format="dummy")


def test_load_format_that_does_not_suit(markov):
    with pytest.raises(ConfigurationError, match="--load-format gguf"):
        resolve(markov, load_format="gguf")


def test_g11_no_network_and_nothing_written(markov, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    before = {file.name: file.stat().st_mtime_ns for file in markov.iterdir()}
    markov.chmod(0o555)
    try:
        load(markov)
    finally:
        markov.chmod(0o755)
    assert {file.name: file.stat().st_mtime_ns for file in markov.iterdir()} == before
