"""Tokenizing takes a place and threads of its own."""

import asyncio
import threading
from pathlib import Path

import pytest
from octavo_fixtures import random_table
from octavo_serving import ServedTable, TableSettings, served


def settings(directory: Path) -> TableSettings:
    return TableSettings(
        directory, random_table(), max_num_seqs=2, server={"max_num_queued_reqs": 0}
    )


def hold_tokenizer(server: ServedTable, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make each text wait for the event."""
    go_on = threading.Event()
    encode, decode = server.model.tokenizer.encode, server.model.tokenizer.decode

    def held_encode(text: str, add_special_tokens: bool = True) -> list[int]:
        go_on.wait(10)
        return encode(text, add_special_tokens)

    def held_decode(token_ids: list[int], skip_special_tokens: bool = True) -> str:
        go_on.wait(10)
        return decode(token_ids, skip_special_tokens)

    monkeypatch.setattr(server.model.tokenizer, "encode", held_encode)
    monkeypatch.setattr(server.model.tokenizer, "decode", held_decode)
    return go_on


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
        ("/detokenize", {"tokens": [97]}),
    ],
)
async def test_tokenizing_takes_a_place(
    byte_bpe_dir: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    async with served(settings(byte_bpe_dir)) as server:
        go_on = hold_tokenizer(server, monkeypatch)
        admission = server.app.state.octavo.serving.admission
        waiting = [asyncio.create_task(server.post(path, **body)) for _ in range(2)]
        try:
            async with asyncio.timeout(5):
                while admission.num_accepted < 2:
                    await asyncio.sleep(0.005)
                refused = await server.post(path, **body)
        finally:
            go_on.set()
        answers = await asyncio.gather(*waiting)
        later = await server.post(path, **body)
    assert refused.status_code == 429
    assert [answer.status_code for answer in (*answers, later)] == [200] * 3
    assert admission.num_accepted == 0


async def test_text_work_leaves_the_default_threads_free(byte_bpe_dir: Path) -> None:
    async with served(settings(byte_bpe_dir)) as server:
        go_on = threading.Event()
        # More than the default pool has threads on any machine.
        held = [asyncio.create_task(server.model.text_work(go_on.wait, 10)) for _ in range(40)]
        try:
            async with asyncio.timeout(5):
                assert await asyncio.to_thread(lambda: 1) == 1
        finally:
            go_on.set()
        assert await asyncio.gather(*held) == [True] * 40
