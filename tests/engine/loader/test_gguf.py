"""GGUF files against the checkpoints they were made from."""

import json
import logging
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from octavo_fixtures import BOS_ID, EOS_ID, make_random_checkpoint
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.config.load import LoadConfig
from octavo.engine.core.errors import CheckpointError
from octavo.engine.loader import gguf as converter
from octavo.engine.loader import gguf_weights, resolve_checkpoint
from octavo.engine.loader.gguf_config import _llama3_scaling
from octavo.engine.loader.gguf_tokenizer import save_tokenizer
from octavo.engine.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "octavo"


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row order of q and k in llama GGUF files; `LlamaModel.permute` of llama.cpp."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    saved = json.loads((source / "tokenizer.json").read_text())
    vocab = dict(saved["model"]["vocab"])
    added = {token["content"]: token for token in saved["added_tokens"]}
    vocab |= {text: token["id"] for text, token in added.items()}
    tokens = sorted(vocab, key=vocab.get)
    kinds = [1 if text not in added else 3 if added[text]["special"] else 4 for text in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in saved["model"]["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template("{{ messages[0].content }}")


def write_gguf(path: Path, source: Path, family: str, quantized=False, keys=None) -> Path:
    """The GGUF file of a checkpoint, with the conventions of llama.cpp's converter."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    add_tokenizer(writer, source)
    for name, value in (keys or {}).items():
        key = f"{family}.{name}" if name.startswith("rope") else name
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 8)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.float().numpy()
        part = name.split(".")[-2]
        if family == "llama" and part in heads:
            values = permuted(values, config[heads[part]])
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if quantized and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def resolve(path: Path):
    return resolve_checkpoint(LoadConfig(model=str(path)))


@pytest.fixture(scope="module")
def llama_gguf(random_llama_dir, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, random_llama_dir, "llama")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_and_facts_are_those_of_the_original(tmp_path, family):
    source = make_random_checkpoint(tmp_path / "source", family)
    path = write_gguf(tmp_path / "tiny.gguf", source, family)
    original = resolve(source)
    checkpoint = resolve(path)
    weights = dict(checkpoint.weights())
    assert weights.keys() == dict(original.weights()).keys()
    for name, tensor in original.weights():
        assert torch.equal(weights[name], tensor.bfloat16()), name
    expected = original.model_config.model_copy(
        update={"dtype": "bfloat16", "eos_token_ids": (EOS_ID,)}
    )
    got = checkpoint.model_config
    assert got.model_copy(update={"rms_norm_eps": expected.rms_norm_eps}) == expected
    assert got.rms_norm_eps == pytest.approx(expected.rms_norm_eps)


def test_quantized_weights_equal_those_that_transformers_reads(random_llama_dir, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", random_llama_dir, "llama", quantized=True)
    config = AutoConfig.from_pretrained(random_llama_dir)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    ours = dict(resolve(path).weights())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.bfloat16()), name


def test_tied_embeddings(tmp_path):
    source = make_random_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    checkpoint = resolve(write_gguf(tmp_path / "tiny.gguf", source, "llama"))
    assert checkpoint.model_config.tie_word_embeddings
    assert "lm_head.weight" not in dict(checkpoint.weights())


def test_tokenizer_of_the_file(llama_gguf, byte_bpe_dir):
    ours = Tokenizer.from_directory(resolve(llama_gguf).tokenizer_dir)
    original = Tokenizer.from_directory(byte_bpe_dir)
    text = "hello the world <think>x</think> 日本<|im_end|>\n  a"
    assert ours.encode(text) == original.encode(text)
    assert ours.special_ids == original.special_ids
    assert (ours.bos_token_id, ours.eos_token_id) == (BOS_ID, EOS_ID)
    assert ours.chat_template == "{{ messages[0].content }}"


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 256,
}


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({}, {"rope_type": "default"}),
        (LINEAR, {"rope_type": "linear", "factor": 4.0}),
        (YARN, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}),
    ],
)
def test_rope_scaling(random_llama_dir, tmp_path, keys, rope):
    path = write_gguf(tmp_path / "tiny.gguf", random_llama_dir, "llama", keys=keys)
    got = resolve(path).model_config.rope.model_dump()
    assert {name: got[name] for name in rope} == rope


def llama3_factors(theta: float, head_dim: int) -> np.ndarray:
    """The divisors that transformers' llama3 rope applies to the plain frequencies."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = AutoConfig.for_model("llama", head_dim=head_dim, rope_parameters=rope)
    inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    return (plain / inv_freq.numpy()).astype(np.float32)


def test_llama3_scaling_is_read_from_the_rope_factors():
    factors = llama3_factors(500000.0, 128)
    scaling = _llama3_scaling(factors, 500000.0, 128)
    assert scaling.pop("factor") == pytest.approx(8.0)
    assert scaling == {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(ValueError, match="rope_freqs"):
        _llama3_scaling(factors[::-1], 500000.0, 128)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "mamba"}, "mamba.*llama, qwen2, qwen3"),
        ({"tokenizer.ggml.pre": "unheard"}, "pre-tokenizer 'unheard'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert'"),
        ({"split.count": 2}, "split over several"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_unsupported_variants_are_named(random_llama_dir, tmp_path, keys, message, cache):
    path = write_gguf(tmp_path / "tiny.gguf", random_llama_dir, "llama", keys=keys)
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: .*{message}"):
        resolve(path)
    assert list(cache.iterdir()) == []


def test_truncated_files_are_refused(llama_gguf, tmp_path, cache):
    content = llama_gguf.read_bytes()
    draw = random.Random(0)
    for keep in (0, 3, 10, *(draw.randrange(len(content)) for _ in range(8)), len(content) - 9):
        path = tmp_path / "cut.gguf"
        path.write_bytes(content[:keep])
        with pytest.raises(CheckpointError, match=r"cut\.gguf.*download it again"):
            resolve(path)
    assert list(cache.iterdir()) == []


def test_second_start_reads_the_cache(llama_gguf, tmp_path, cache, monkeypatch):
    first = resolve(llama_gguf).tokenizer_dir
    assert first.parent == cache
    monkeypatch.setattr(converter, "_convert", None)
    copy = tmp_path / "renamed.gguf"
    copy.write_bytes(llama_gguf.read_bytes())
    assert resolve(copy).tokenizer_dir == first


def test_g11_cache_that_cannot_be_written(llama_gguf, tmp_path, monkeypatch, caplog):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with caplog.at_level(logging.WARNING):
        checkpoint = resolve(llama_gguf)
    assert "cannot be written" in caplog.text
    assert "model.norm.weight" in dict(checkpoint.weights())


def test_g11_user_without_a_home(llama_gguf, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(converter, "cache_root", lambda: "~/.cache")
    with caplog.at_level(logging.WARNING):
        resolve(llama_gguf)
    assert "cannot be written" in caplog.text
    assert not (tmp_path / "~").exists()


def test_large_models_are_written_in_shards(llama_gguf, monkeypatch):
    whole = dict(resolve(llama_gguf).weights())
    monkeypatch.setattr(gguf_weights, "_SHARD_BYTES", 50_000)
    monkeypatch.setattr(converter, "_FORMAT", "gguf-test")
    checkpoint = resolve(llama_gguf)
    assert len(list(checkpoint.tokenizer_dir.glob("model-*.safetensors"))) > 1
    sharded = dict(checkpoint.weights())
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def spm_metadata(spm_dir: Path) -> dict[str, object]:
    """A SentencePiece vocabulary as GGUF files hold it: scores, no merges."""
    saved = json.loads((spm_dir / "tokenizer.json").read_text())
    vocab = saved["model"]["vocab"]
    ranks = {"".join(pair): -rank for rank, pair in enumerate(saved["model"]["merges"], start=1)}
    tokens = sorted(vocab, key=vocab.get)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(ranks.get(token, -10_000)) for token in tokens],
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "</s>") else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_tokenizer_of_a_file(spm_dir, tmp_path):
    save_tokenizer(spm_metadata(spm_dir), tmp_path)
    ours, original = Tokenizer.from_directory(tmp_path), Tokenizer.from_directory(spm_dir)
    for text in ("Hello world, the  leading I\n日本 🧡", " x", ""):
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))


def test_starter_facts(starter_checkpoint):
    config = starter_checkpoint.model_config
    assert starter_checkpoint.name == "SmolLM2-135M-Instruct"
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.max_model_len, config.rope.theta) == (8192, 100000.0)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


def test_starter_samples_as_its_model_card_advises(starter_checkpoint):
    assert starter_checkpoint.generation_defaults == {"temperature": 0.2, "top_p": 0.9}


def test_starter_tokenizer_cuts_digits_and_keeps_control_tokens(starter_checkpoint):
    tokenizer = Tokenizer.from_directory(starter_checkpoint.tokenizer_dir)
    pieces = [tokenizer.token_piece(token) for token in tokenizer.encode("in  2024<|im_end|>")]
    assert pieces == ["in", "ĠĠ", "2", "0", "2", "4", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b")) == "ab"
