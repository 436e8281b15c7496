"""Encoders against transformers' model, run on one text at a time and pooled in float64."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel

from octavo.config.engine import EngineConfig
from octavo.config.load import LoadConfig
from octavo.engine.core.errors import CheckpointError, ConfigurationError
from octavo.engine.core.pooling import Pooling
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import NewSequence, ScheduledSequence, SchedulerOutput
from octavo.engine.executor.encoder import EncoderExecutor
from octavo.engine.loader import resolve_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "initializer_range": 0.3,
}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
EXTRA: dict[str, dict[str, Any]] = {
    "distilbert": DISTILBERT,
    "modernbert": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1}
    | {"sep_token_id": 2},
}
MODES = {
    Pooling.CLS: "pooling_mode_cls_token",
    Pooling.MEAN: "pooling_mode_mean_tokens",
    Pooling.LAST: "pooling_mode_lasttoken",
}
PROMPTS = [list(range(10, 10 + length)) for length in (1, 3, 17, 40, 5)]


def make_encoder(directory: Path, family: str = "bert", pooling: Pooling | None = None) -> Path:
    """A random encoder; its pooling as sentence-transformers writes it, if given."""
    config = AutoConfig.for_model(family, **SIZES | EXTRA.get(family, {}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModel.from_config(config).save_pretrained(directory)
    if pooling is not None:
        modules = [
            {"type": f"sentence_transformers.models.{kind}", "path": path}
            for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"))
        ]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        mode = {name: name == MODES[pooling] for name in MODES.values()}
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    return directory


def make_executor(directory: Path, **load: Any) -> EncoderExecutor:
    config = EngineConfig.model_validate(
        {"load": {"model": str(directory), **load}, "device": {"device": "cpu"}}
        | {"scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 60}}
    )
    return EncoderExecutor(config, resolve_checkpoint(config.load))


def new_sequence(seq_id: int, prompt: list[int]) -> NewSequence:
    params = SamplingParams(max_tokens=0, pooling=Pooling.MEAN)
    return NewSequence(seq_id, 0, tuple(prompt), len(prompt), 0, (), params, 0)


def step(
    executor: EncoderExecutor,
    prompts: list[list[int]],
    counts: list[int] | None = None,
    sample: bool = True,
) -> dict[int, np.ndarray]:
    counts = counts or [len(prompt) for prompt in prompts]
    new = tuple(new_sequence(seq_id, prompt) for seq_id, prompt in enumerate(prompts))
    scheduled = tuple(
        ScheduledSequence(seq_id, count, 0, (), sample) for seq_id, count in enumerate(counts)
    )
    output = executor.execute_model(SchedulerOutput(0, new, scheduled, (), ()))
    assert not output.failed
    return dict(output.embeddings)


def expected(directory: Path, prompt: list[int], pooling: Pooling) -> np.ndarray:
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    vector = {Pooling.LAST: states[-1], Pooling.CLS: states[0], Pooling.MEAN: states.mean(0)}
    return vector[pooling] / np.linalg.norm(vector[pooling])


@pytest.mark.parametrize(
    "family", ["bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "electra", "modernbert"]
)
def test_a_padded_batch_equals_single_texts(tmp_path: Path, family: str) -> None:
    directory = make_encoder(tmp_path, family)
    embeddings = step(make_executor(directory), PROMPTS)
    assert embeddings.keys() == set(range(len(PROMPTS)))
    for seq_id, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(
            embeddings[seq_id], expected(directory, prompt, Pooling.MEAN), atol=1e-5
        )


@pytest.mark.parametrize("pooling", Pooling)
def test_pooling_is_that_of_the_checkpoint(tmp_path: Path, pooling: Pooling) -> None:
    directory = make_encoder(tmp_path, pooling=pooling)
    embeddings = step(make_executor(directory), PROMPTS[:3])
    for seq_id, prompt in enumerate(PROMPTS[:3]):
        np.testing.assert_allclose(
            embeddings[seq_id], expected(directory, prompt, pooling), atol=1e-5
        )


def test_a_prompt_in_chunks_is_read_as_a_whole(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path)
    executor = make_executor(directory)
    prompt = list(range(5, 50))
    assert step(executor, [prompt], counts=[30], sample=False) == {}
    last = ScheduledSequence(0, 15, 0, (), True)
    output = executor.execute_model(SchedulerOutput(1, (), (last,), (), ()))
    np.testing.assert_allclose(
        output.embeddings[0], expected(directory, prompt, Pooling.MEAN), atol=1e-5
    )
    executor.execute_model(SchedulerOutput(2, (), (), (0,), ()))


def test_the_context_is_the_models(tmp_path: Path) -> None:
    # The first two positions of this family are taken by the padding token.
    assert make_executor(make_encoder(tmp_path / "a", "roberta")).max_model_len == 64
    directory = make_encoder(tmp_path / "b")
    assert make_executor(directory).max_model_len == 66
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    assert make_executor(directory).max_model_len == 40
    assert make_executor(directory, max_model_len=8).max_model_len == 8
    with pytest.raises(ConfigurationError, match="40"):
        make_executor(directory, max_model_len=41)


def test_int8_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--quantization int8 is for models that write"):
        make_executor(make_encoder(tmp_path), quantization="int8")


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"lacks encoder\.layer\.2"):
        make_executor(directory)
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        make_executor(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        resolve_checkpoint(LoadConfig(model=str(directory)))
