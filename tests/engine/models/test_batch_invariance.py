"""Logits on CPU are the same to the last bit, however a prompt is cut and whoever is there."""

from typing import Any

import pytest
import torch
from hf_pair import load_ours, make_hf, random_ids
from paged_driver import PagedDriver
from torch import Tensor

from octavo.engine.models.decoder import CausalLM

_LENGTH = 150
_CHUNKS = (1, 7, 64, 149)
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-gelu": ("llama", {"hidden_act": "gelu", "intermediate_size": 96}),
    "llama-tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True}),
    "qwen2": ("qwen2", {"num_attention_heads": 6}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 21}),
}

_INT8 = ("llama-tanh", "qwen2", "qwen3")


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[*_MODELS, *(f"{name}-int8" for name in _INT8)])
def model(request: pytest.FixtureRequest, dtype: torch.dtype) -> CausalLM:
    name = request.param.removesuffix("-int8")
    family, keys = _MODELS[name]
    hf = make_hf(family, initializer_range=0.1, **keys)
    return load_ours(hf, dtype, int8=name != request.param)


def test_prompt_whole_in_chunks_and_in_company(model: CausalLM) -> None:
    ids = random_ids(_LENGTH)
    driver = PagedDriver(model)
    whole = driver.prefill(0, ids)
    for chunk in _CHUNKS:
        driver.free(0)
        assert torch.equal(driver.prefill(0, ids, chunk), whole), chunk
    company = {row: random_ids(row, seed=row) for row in (1, 3, 40)}
    driver.step(company)
    driver.free(0)
    driver.prefill(0, ids[:77])
    step = {row: random_ids(row % 4 + 1, seed=row) for row in company}
    assert torch.equal(driver.step({**step, 0: ids[77:]})[0], whole[77:])


def test_program_and_layers_agree(model: CausalLM) -> None:
    steps = [
        {0: random_ids(90), 1: random_ids(1), 2: random_ids(33, seed=2)},
        {2: [5], 1: random_ids(20, seed=3), 0: [6]},
        {0: [7], 1: [8]},
    ]
    program, by_program, by_layers = model.program, PagedDriver(model), PagedDriver(model)
    assert program is not None
    for step in steps:
        model.program = program
        actual = by_program.step(step)
        model.program = None
        expected = by_layers.step(step)
        for row, logits in expected.items():
            assert torch.equal(actual[row], logits)


def test_hidden_states_outlive_later_steps_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_ours(make_hf("llama"), torch.float32)
    program = model.program
    assert program is not None
    run, kept, copies = program.run, [], []

    def run_and_keep(step: Any) -> Tensor:
        hidden = run(step)
        kept.append(hidden)
        copies.append(hidden.clone())
        return hidden

    monkeypatch.setattr(program, "run", run_and_keep)
    driver = PagedDriver(model)
    for number in range(4):
        driver.step({0: [number], 1: [number + 9]})
    assert not torch.equal(copies[0], copies[1])
    assert all(map(torch.equal, kept, copies))
