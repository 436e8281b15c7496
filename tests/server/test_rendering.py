"""The event loop goes on while long lists of log-probabilities are rendered."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from octavo_fixtures import random_table
from octavo_serving import TableSettings, served

from octavo.engine.core.model_output import TokenLogprobs
from octavo.engine.core.request import FinishReason
from octavo.engine.core.request_output import SequenceDelta
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.tokenizer import Tokenizer
from octavo.server import logprobs
from octavo.server.rendering import LARGE

NUM_TOKENS = LARGE + 20
CHAT = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
COMPLETION = {"prompt": "a", "logprobs": 2}
RESPONSE = {
    "input": "a",
    "max_output_tokens": NUM_TOKENS,
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs"],
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which values of log-probabilities are rendered."""
    seen: list[int] = []
    finite: Callable[[float], float] = logprobs.finite

    def noted(value: float) -> float:
        seen.append(threading.get_ident())
        return finite(value)

    monkeypatch.setattr(logprobs, "finite", noted)
    return seen


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"logprobs": False, "prompt_logprobs": 2}),
        ("/v1/completions", COMPLETION),
        ("/v1/completions", COMPLETION | {"n": 2, "echo": True, "stream": True}),
        ("/v1/responses", RESPONSE),
    ],
)
async def test_long_lists_are_rendered_off_the_loop(
    byte_bpe_dir: Path, threads: list[int], path: str, body: dict[str, Any]
) -> None:
    body = {"temperature": 0, **body}
    if body.get("echo") or body.get("prompt_logprobs"):
        # The prompt is what is long.
        body["max_tokens"] = 2
        if "prompt" in body:
            body["prompt"] = "ab" * NUM_TOKENS
        else:
            body["messages"] = [{"role": "user", "content": "ab" * NUM_TOKENS}]
    elif "input" not in body:
        body["max_tokens"] = NUM_TOKENS
    table = random_table()
    table[:, 128:] = -50  # no end
    async with served(TableSettings(byte_bpe_dir, table, max_model_len=1024, num_blocks=128)) as s:
        response = await s.post(path, **body)
    assert response.status_code == 200, response.text
    assert len(threads) > LARGE
    assert threading.get_ident() not in threads


async def test_short_lists_are_rendered_at_once(byte_bpe_dir: Path, threads: list[int]) -> None:
    async with served(TableSettings(byte_bpe_dir, random_table())) as server:
        await server.post("/v1/completions", **COMPLETION, max_tokens=3, temperature=0)
    assert set(threads) == {threading.get_ident()}


def test_records_of_a_prompt_are_made_when_they_are_read(
    byte_bpe_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_directory(byte_bpe_dir)
    asked: list[int] = []
    token_text = tokenizer.token_text

    def noted(token_id: int) -> str:
        asked.append(token_id)
        return token_text(token_id)

    monkeypatch.setattr(tokenizer, "token_text", noted)
    processor = OutputProcessor(tokenizer)
    processor.add("r", [97, 98], SamplingParams(max_tokens=1, prompt_logprobs=0))
    entry = TokenLogprobs(98, -1.0, 1, ())
    ended = SequenceDelta("r", 0, (), finish_reason=FinishReason.LENGTH, prompt_logprobs=(entry,))
    (output,) = processor.process([ended]).outputs["r"]
    assert output.prompt_logprobs is not None
    assert (len(output.prompt_logprobs), asked) == (1, [])
    assert [record.text for record in output.prompt_logprobs] == ["b"]
