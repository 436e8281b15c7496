"""The request bodies of vLLM's benchmark client, and what it reads from the answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from octavo_fixtures import random_table
from octavo_serving import TableSettings, served, sse_events
from whole_server import CHAT, COMPLETIONS

OUTPUT_LEN = 12
SHARED: dict[str, Any] = {
    "model": "M",
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello world", "max_tokens": OUTPUT_LEN, **SHARED},
    CHAT: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello world"}]}],
        "max_completion_tokens": OUTPUT_LEN,
        **SHARED,
    },
}


@pytest.mark.parametrize("path", BODIES)
async def test_bodies_of_vllms_benchmark(byte_bpe_dir: Path, path: str) -> None:
    table = random_table()
    table[:, 128:] = -50
    async with served(TableSettings(byte_bpe_dir, table)) as server:
        response = await server.post(path, **BODIES[path])
        assert response.status_code == 200, response.text
        *events, done = sse_events(response.content)
        assert done == "[DONE]"
        text, counts = "", []
        for event in map(json.loads, events):
            # In this order: a chunk with choices is text, else one with usage is the count.
            if choices := event.get("choices"):
                piece = choices[0]["delta"] if path == CHAT else choices[0]
                text += piece.get("content" if path == CHAT else "text") or ""
            elif usage := event.get("usage"):
                counts.append(usage["completion_tokens"])
        assert counts == [OUTPUT_LEN]
        assert len(text) == OUTPUT_LEN
