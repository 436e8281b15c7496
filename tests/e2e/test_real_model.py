"""The whole server over a small model with real attention, in float32, against transformers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import torch
from octavo_serving import sse_events
from transformers import AutoModelForCausalLM

from octavo.config.cache import CacheConfig
from octavo.config.device import DeviceConfig
from octavo.config.engine import EngineConfig
from octavo.config.load import LoadConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.config.server import ServerConfig
from octavo.server.app import create_app
from octavo.server.lifecycle import Phase
from octavo.server.startup import load_engine
from octavo.server.state import AppState

NUM_STREAMS = 32
MAX_TOKENS = 24


@asynccontextmanager
async def serve(checkpoint: Path, num_blocks: int, num_tokens: int = 64) -> AsyncIterator[Any]:
    engine_config = EngineConfig(
        load=LoadConfig(model=str(checkpoint)),
        cache=CacheConfig(num_gpu_blocks_override=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=NUM_STREAMS, max_num_batched_tokens=num_tokens),
        device=DeviceConfig(device="cpu"),
    )
    app = create_app(ServerConfig(), engine_config, load_engine)
    state: AppState = app.state.octavo
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=60) as client,
    ):
        async with asyncio.timeout(60):
            while state.lifecycle.phase is not Phase.READY:
                await asyncio.sleep(0.01)
        yield client, state


def make_prompts() -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, 256, 5 + 3 * i).tolist() for i in range(NUM_STREAMS)]


async def stream_ids(client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> list[int]:
    body = {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    answer = await client.post("/v1/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    events = sse_events(answer.content)
    assert events[-1] == "[DONE]"
    choices = [orjson.loads(event)["choices"][0] for event in events[:-1]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    return [token_id for choice in choices for token_id in choice["token_ids"]]


@pytest.fixture(scope="module")
def greedy(random_llama_dir: Path) -> list[list[int]]:
    """What transformers generates for each prompt on its own."""
    model = AutoModelForCausalLM.from_pretrained(
        random_llama_dir, dtype=torch.float32, attn_implementation="eager"
    )
    texts = []
    for prompt in make_prompts():
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        texts.append(output[0, len(prompt) :].tolist())
    return texts


async def test_concurrent_streams_give_the_ids_that_transformers_gives_alone(
    random_llama_dir: Path, greedy: list[list[int]]
) -> None:
    async with serve(random_llama_dir, num_blocks=512) as (client, _):
        texts = await asyncio.gather(*(stream_ids(client, p) for p in make_prompts()))
    assert texts == greedy


async def test_f02_preemption_is_invisible(random_llama_dir: Path, greedy: list[list[int]]) -> None:
    async with serve(random_llama_dir, num_blocks=24) as (client, state):
        texts = await asyncio.gather(*(stream_ids(client, p) for p in make_prompts()))
        assert state.serving is not None
        stats = state.serving.engine.stats()
    assert texts == greedy
    assert stats.num_preemptions > 0
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


async def test_seeded_draws_do_not_depend_on_the_company(random_llama_dir: Path) -> None:
    prompt = make_prompts()[3]
    drawn = {"temperature": 0.8, "seed": 42}
    async with serve(random_llama_dir, num_blocks=512) as (client, _):
        alone = await stream_ids(client, prompt, **drawn)
        company = [stream_ids(client, p, temperature=1.0) for p in make_prompts()[:8]]
        together = await asyncio.gather(stream_ids(client, prompt, **drawn), *company)
    assert together[0] == alone
