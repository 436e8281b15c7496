"""Sampling through the whole server, on a model whose next-token distributions are known."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from octavo_fixtures import BOS_ID, EOS_ID, IM_END_ID, VOCAB_SIZE, random_table
from whole_server import COMPLETIONS, whole_server

MakeMarkov = Callable[..., Path]

ENDS = (EOS_ID, IM_END_ID)


def endless_table() -> np.ndarray:
    table = random_table()
    table[:, BOS_ID:] = -50
    return table


async def test_b03_a_neighbour_does_not_feel_a_logit_bias(markov_dir: MakeMarkov) -> None:
    table = endless_table()
    first, second = np.argsort(-table[97])[:2].tolist()
    plain = {"prompt": [97], "temperature": 0, "max_tokens": 8}
    async with whole_server(markov_dir(table=table)) as server:
        alone = await server.texts(**plain)
        forced, avoided, *neighbours = await asyncio.gather(
            server.texts(**plain | {"max_tokens": 3}, logit_bias={"65": 100}),
            server.post(
                COMPLETIONS,
                **plain | {"max_tokens": 1},
                logit_bias={str(first): -100},
                return_token_ids=True,
            ),
            *(server.texts(**plain) for _ in range(4)),
        )
    assert forced == ["AAA"]
    assert avoided["choices"][0]["token_ids"] == [second]
    assert neighbours == [alone] * 4


async def test_d03_seeds_and_batch_mates(markov_dir: MakeMarkov) -> None:
    base = {"prompt": "a", "temperature": 0.8, "max_tokens": 40}
    async with whole_server(markov_dir(table=endless_table())) as server:

        async def seeded(**fields: Any) -> list[str]:
            return await server.texts(**base | {"seed": 42} | fields)

        alone = await seeded()
        unseeded = await asyncio.gather(seeded(), *(server.texts(**base) for _ in range(7)))
        others = await asyncio.gather(seeded(), *(seeded(seed=seed) for seed in range(7)))
        twice = await asyncio.gather(seeded(), seeded())
        pair, pair_again = await seeded(n=2), await seeded(n=2)
        zero = await asyncio.gather(seeded(seed=0), seeded(seed=0))
    assert unseeded[0] == others[0] == twice[0] == twice[1] == alone
    assert pair[0] == alone[0] != pair[1]
    assert pair_again == pair
    assert zero[0] == zero[1] != alone
    assert len({text for texts in unseeded for text in texts}) == 8


async def test_d04_what_the_penalties_count(markov_dir: MakeMarkov) -> None:
    p, q, r = 80, 81, 82
    table = np.full((VOCAB_SIZE, VOCAB_SIZE), -5, np.float32)
    table[:, [p, q, r]] = [5.0, 4.0, 3.5]
    base = {"prompt": [p, p, p], "temperature": 0, "max_tokens": 3}
    async with whole_server(markov_dir(table=table)) as server:
        # Generated tokens only: P leads at first, then each is pushed below the next one.
        assert await server.texts(**base, presence_penalty=2) == ["PQR"]
        assert await server.texts(**base, frequency_penalty=2) == ["PQR"]
        # The prompt counts: P starts at 2.5; after Q (2) and R (1.75) it leads again.
        assert await server.texts(**base, repetition_penalty=2) == ["QRP"]
        assert await server.texts(**base) == ["PPP"]


async def test_d06_min_tokens_and_ignore_eos(markov_dir: MakeMarkov) -> None:
    async with whole_server(markov_dir(table=endless_table())) as server:

        async def count(**fields: Any) -> tuple[int, str]:
            body = {"prompt": "a", "temperature": 0, "max_tokens": 32} | fields
            answer = await server.post(COMPLETIONS, **body)
            return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

        for end in ENDS:
            wanted = {"logit_bias": {str(end): 100}, "min_tokens": 4}
            assert await count(**wanted) == (5, "stop")
            assert await count(**wanted, prompt=[97] * 100) == (5, "stop")
            kept = {"logit_bias": {str(end): 100}, "ignore_eos": True}
            assert await count(**kept, max_tokens=50) == (50, "length")
            assert await count(**kept, stop_token_ids=[end]) == (1, "stop")
        (text,) = await server.texts(prompt="a", temperature=0, max_tokens=32)
        early = await count(stop=[text[1]])
        late = await count(stop=[text[1]], min_tokens=4)
        assert early[1] == "stop"
        assert early[0] < 4 < late[0]
        last = {"logit_bias": {str(VOCAB_SIZE - 1): 100}, "ignore_eos": True}
        answer = await server.post(
            COMPLETIONS, prompt="a", max_tokens=2, temperature=0, return_token_ids=True, **last
        )
        assert answer["choices"][0]["token_ids"] == [VOCAB_SIZE - 1] * 2


CHI_SQUARE = {1: 23.9, 2: 27.6, 3: 30.7}
"""Values that a true distribution exceeds once in a million, by degrees of freedom."""


async def test_d08_rows_of_mixed_batches(markov_dir: MakeMarkov) -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    ids = [65, 66, 67, 68]
    table = np.full((VOCAB_SIZE, VOCAB_SIZE), -1000, np.float32)
    table[:, ids] = np.log(probabilities)
    settings: dict[str, dict[str, Any]] = {
        "best": {"temperature": 0},
        "plain": {"temperature": 1},
        "top_k": {"temperature": 1, "top_k": 2},
        "top_p": {"temperature": 1, "top_p": 0.75},
        "min_p": {"temperature": 1, "min_p": 0.4},
        "hot": {"temperature": 2},
    }
    hot = np.sqrt(probabilities) / np.sqrt(probabilities).sum()
    expected = {
        "best": np.array([1.0, 0, 0, 0]),
        "plain": probabilities,
        **dict.fromkeys(("top_k", "top_p", "min_p"), np.array([5 / 8, 3 / 8, 0, 0])),
        "hot": hot,
    }
    counts: dict[str, Counter[str]] = {name: Counter() for name in settings}
    async with whole_server(markov_dir(table=table)) as server:

        async def draw(name: str, length: int) -> None:
            texts = await server.texts(
                prompt=[97], n=20, max_tokens=length, ignore_eos=True, **settings[name]
            )
            counts[name].update(text[0] for text in texts)

        # Lengths differ, so that rows join and leave.
        await asyncio.gather(*(draw(name, 1 + k % 3) for k in range(20) for name in settings))
        assert await server.is_idle()
    for name, wanted in expected.items():
        found = np.array([counts[name][chr(token_id)] for token_id in ids])
        assert found.sum() == counts[name].total() == 400
        possible = wanted > 0
        assert not found[~possible].any(), name
        if possible.sum() > 1:
            mean = 400 * wanted[possible]
            distance = float(((found[possible] - mean) ** 2 / mean).sum())
            assert distance < CHI_SQUARE[int(possible.sum()) - 1], (name, found)


async def test_masks_that_leave_nothing_are_the_requests_own_fault(markov_dir: MakeMarkov) -> None:
    masked: dict[str, Any] = {"prompt": "z", "allowed_token_ids": [EOS_ID], "min_tokens": 1}
    beams = {"n": 2, "use_beam_search": True, "allowed_token_ids": [65, 66], "max_tokens": 1}
    async with whole_server(markov_dir([65, 66])) as server:
        await server.refused(COMPLETIONS, **masked)
        await server.refused(COMPLETIONS, prompt="z", **beams, ignore_eos=True, bad_words=["A"])
        metrics = (await server.client.get("/metrics")).text
    assert re.search(r"^octavo:corrupted_requests_total\{.*\} 0\.0$", metrics, re.MULTILINE)
