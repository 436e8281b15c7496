"""Beam search through the whole server, against transformers' generate on the same checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from octavo_fixtures import EOS_ID, IM_END_ID, VOCAB_SIZE
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_server import CHAT, COMPLETIONS, whole_server

PROMPT = "the quick brown fox"


def expected(
    checkpoint: Path, ids: list[int], width: int, n: int, **options: Any
) -> list[list[int]]:
    """Generated ids of the n best texts, end token included, best first."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ends = (EOS_ID, IM_END_ID)
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        num_beams=width,
        num_return_sequences=n,
        do_sample=False,
        eos_token_id=list(ends),
        pad_token_id=0,
        **options,
    )
    texts = [sequence[len(ids) :].tolist() for sequence in output]
    lengths = [next((i + 1 for i, t in enumerate(text) if t in ends), None) for text in texts]
    return [text[:length] for text, length in zip(texts, lengths, strict=True)]


@pytest.mark.parametrize("length_penalty", [-2.0, 1.0])
async def test_texts_are_those_of_transformers(
    random_llama_dir: Path, length_penalty: float
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(random_llama_dir)
    fields = {
        "use_beam_search": True,
        "length_penalty": length_penalty,
        "max_tokens": 12,
        # Ends turn up in the search, so that lengths differ and the penalty counts.
        "logit_bias": {str(EOS_ID): 3.0},
        "return_token_ids": True,
    }
    bias = {"sequence_bias": {(EOS_ID,): 3.0}}
    async with whole_server(random_llama_dir) as server:
        wide = await server.post(COMPLETIONS, prompt=PROMPT, n=2, best_of=5, **fields)
        drawn = {"temperature": 1.7, "top_p": 0.5, "top_k": 2, "min_p": 0.5, "seed": 3}
        same = await server.post(COMPLETIONS, prompt=PROMPT, n=2, best_of=5, **fields, **drawn)
        messages = [{"role": "user", "content": PROMPT}]
        chat = await server.post(CHAT, messages=messages, n=3, **fields)
        assert await server.is_idle()

    for answer, width, n in ((wide, 5, 2), (chat, 3, 3)):
        prompt = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        wanted = expected(
            random_llama_dir,
            prompt,
            width,
            n,
            max_new_tokens=12,
            length_penalty=length_penalty,
            **bias,
        )
        choices = answer["choices"]
        assert [choice["token_ids"] for choice in choices] == wanted
        assert [choice["index"] for choice in choices] == list(range(n))
        for choice, ids in zip(choices, wanted, strict=True):
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert text == tokenizer.decode(prompt + ids, skip_special_tokens=True).removeprefix(
                tokenizer.decode(prompt, skip_special_tokens=True)
            )
            ended = ids[-1] in (EOS_ID, IM_END_ID)
            assert choice["finish_reason"] == ("stop" if ended else "length")
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == sum(map(len, wanted))
    reasons = [choice["finish_reason"] for choice in wide["choices"] + chat["choices"]]
    assert "stop" in reasons
    assert [c["token_ids"] for c in same["choices"]] == [c["token_ids"] for c in wide["choices"]]


async def test_texts_keep_the_order_of_their_scores(markov_dir: Callable[..., Path]) -> None:
    a, b, c = 65, 66, 67
    table = np.full((VOCAB_SIZE, VOCAB_SIZE), -50, np.float32)
    # "a" and an end: mean -0.75. "bc...": mean -0.25 a token, but the greater sum.
    table[97, [a, b]] = np.log([0.4, 0.6])
    table[a, EOS_ID] = 0
    table[b, [c, EOS_ID]] = np.log([0.5, 0.5])
    table[c, c] = 0
    async with whole_server(markov_dir(table=table)) as server:
        fields = {"prompt": [97], "n": 2, "best_of": 4, "max_tokens": 4, "use_beam_search": True}
        by_sum = await server.texts(**fields, length_penalty=0)
        by_mean = await server.texts(**fields, length_penalty=1)
        answer = await server.post(COMPLETIONS, **fields, length_penalty=0, logprobs=0)
    # Sums: A -0.92, B and BCCC -1.20 each; means: BCCC -0.30, A -0.46.
    assert by_sum[0] == "A"
    assert by_mean == ["BCCC", "A"]
    first = answer["choices"][0]["logprobs"]
    assert sum(first["token_logprobs"]) == pytest.approx(np.log(0.4), abs=1e-4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "use_beam_search"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"length_penalty": 1e6}, "length_penalty"),
    ({"early_stopping": "always"}, "early_stopping"),
    ({"n": 33}, "n"),
    ({"n": 8, "max_tokens": 100}, "max_tokens"),
    ({"n": 3, "allowed_token_ids": [65]}, "allowed_token_ids"),
    ({"n": 4, "allowed_token_ids": [65, EOS_ID], "max_tokens": 2}, "allowed_token_ids"),
]


async def test_early_stopping_takes_the_first_texts_that_end(
    markov_dir: Callable[..., Path],
) -> None:
    table = np.full((VOCAB_SIZE, VOCAB_SIZE), -50, np.float32)
    # The likelier id ends the text, but the mean of a long one is better.
    table[97, [EOS_ID, 66]] = np.log([0.6, 0.4])
    table[66, 66] = 0
    async with whole_server(markov_dir(table=table)) as server:
        fields = {"prompt": [97], "n": 1, "max_tokens": 4, "use_beam_search": True}
        first = await server.texts(**fields, early_stopping=True)
        patient = await server.texts(**fields, early_stopping="never")
    assert (first, patient) == ([""], ["BBBB"])


async def test_searches_that_cannot_be_are_refused_at_the_door(random_llama_dir: Path) -> None:
    beams = {"max_tokens": 4, "use_beam_search": True}
    messages = [{"role": "user", "content": "a"}]
    async with whole_server(random_llama_dir, num_blocks=32) as server:
        for fields, param in REFUSED:
            error = await server.refused(COMPLETIONS, **{"prompt": "a", **beams, **fields})
            assert error["param"] == param, error
            error = await server.refused(CHAT, **{"messages": messages, **beams, **fields})
            assert error["param"] == param, error
        error = await server.refused(COMPLETIONS, prompt="a", **beams, best_of=5, n=6)
        assert error["param"] == "best_of"
        # All the texts that there are.
        ids = {"allowed_token_ids": [65, EOS_ID], "max_tokens": 2}
        found = await server.texts(**{"prompt": "a", **beams, **ids}, n=3)
        assert sorted(found) == ["", "A", "AA"]
        assert await server.is_idle()


async def test_a_penalty_of_the_checkpoint_is_no_obstacle(markov_dir: Callable[..., Path]) -> None:
    defaults = {"repetition_penalty": 1.3, "temperature": 0.5}
    checkpoint = markov_dir([65, 66], generation_config=defaults)
    async with whole_server(checkpoint) as server:
        texts = await server.texts(prompt="z", n=2, use_beam_search=True, max_tokens=2)
    assert texts[0] == "AB"


async def test_stop_strings_end_a_beam_in_its_text(markov_dir: Callable[..., Path]) -> None:
    checkpoint = markov_dir([65, 66, 67])
    async with whole_server(checkpoint) as server:
        fields = {"prompt": "z", "use_beam_search": True, "max_tokens": 3, "stop": ["B"]}
        answer = await server.post(COMPLETIONS, **fields)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("A", "stop", "B")
    assert answer["usage"]["completion_tokens"] == 2
