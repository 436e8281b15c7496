"""No field is accepted and ignored: each changes the answer of a request that it is added to.

A new field of a body turns this red until it says here what it changes.
"""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from octavo_fixtures import BOS_ID, CHAT_TEMPLATE, EOS_ID, random_table, token_id
from whole_server import CHAT, COMPLETIONS, WholeServer, whole_server

from octavo.server.protocol.chat import ChatCompletionRequest
from octavo.server.protocol.common import WITHOUT_EFFECT, GenerationBody
from octavo.server.protocol.completion import CompletionRequest
from octavo.server.protocol.responses import ResponsesRequest

MakeMarkov = Callable[..., Path]

RESPONSES = "/v1/responses"
PROMPT = "hello world the and capital of France is Paris Warsaw What Answer you are it " * 2
USER = {"role": "user", "content": PROMPT}
OPEN = {"messages": [USER, {"role": "assistant", "content": "so"}], "add_generation_prompt": False}
FEW = [token_id(letter) for letter in "abcdef"]

BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 12},
    CHAT: {"messages": [USER], "max_tokens": 12},
    RESPONSES: {"input": PROMPT, "max_output_tokens": 12},
}
SEEDED: dict[str, Any] = {"temperature": 1, "seed": 5}
FEW_TOKENS = {"allowed_token_ids": FEW}
ENDING = {"logit_bias": {str(EOS_ID): 9}}
SPECIAL = {"logit_bias": {str(BOS_ID): 9}}
SEARCH = {"use_beam_search": True}

Case = tuple[Any, dict[str, Any]]
"""A value of the field, and what the request holds besides."""

COMMON: dict[str, Case] = {
    "model": ("nope", {}),
    "stream": (True, {}),
    "temperature": (0, {}),
    "top_p": (0.01, {}),
    "top_k": (1, {}),
    "min_p": (1, {}),
    "presence_penalty": (2, FEW_TOKENS),
    "frequency_penalty": (2, FEW_TOKENS),
    "repetition_penalty": (5, FEW_TOKENS),
    "logit_bias": ({"97": 100}, {}),
    "seed": (6, {}),
    "stop": (["a", "b", "c"], FEW_TOKENS),
    "stop_token_ids": (FEW[:3], FEW_TOKENS),
    "include_stop_str_in_output": (True, {**FEW_TOKENS, "stop": ["a", "b", "c"]}),
    "ignore_eos": (True, ENDING),
    "min_tokens": (12, ENDING),
    "skip_special_tokens": (False, SPECIAL),
    "truncate_prompt_tokens": (1, {}),
    "truncation_side": ("right", {"truncate_prompt_tokens": 5}),
    "allowed_token_ids": (FEW, {}),
    "bad_words": (["a", "b", "c"], FEW_TOKENS),
    "priority": (1, {}),
    "cache_salt": ("salt", {}),
    "request_id": ("chosen", {}),
}
OF_CHOICES: dict[str, Case] = {
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "n": (2, {}),
    "use_beam_search": (True, {}),
    "length_penalty": (-9, {**SEARCH, **ENDING, "n": 4}),
    "prompt_logprobs": (1, {}),
    "return_token_ids": (True, {}),
}
OF_TEMPLATE: dict[str, Case] = {"chat_template_kwargs": ({"mood": "good"}, {})}
CASES: dict[str, dict[str, Case]] = {
    COMPLETIONS: {
        **COMMON,
        **OF_CHOICES,
        "prompt": ("another", {}),
        "max_tokens": (5, {}),
        "best_of": (4, {}),
        "echo": (True, {}),
        "logprobs": (1, {}),
        "add_special_tokens": (False, {}),
        "return_tokens_as_token_ids": (True, {"logprobs": 1}),
    },
    CHAT: {
        **COMMON,
        **OF_CHOICES,
        **OF_TEMPLATE,
        "messages": ([{"role": "user", "content": "another"}], {}),
        "add_generation_prompt": (False, {}),
        "continue_final_message": (True, OPEN),
        "echo": (True, {**OPEN, "continue_final_message": True}),
        "add_special_tokens": (True, {}),
        "chat_template": ("{{ messages[0].content }}", {}),
        "max_completion_tokens": (5, {}),
        "max_tokens": (5, {}),
        "best_of": (4, {}),
        "logprobs": (True, {}),
        "top_logprobs": (2, {"logprobs": True}),
        "return_tokens_as_token_ids": (True, {"logprobs": True}),
        "reasoning_effort": ("high", {}),
        "tool_choice": ("auto", {}),
    },
    RESPONSES: {
        **COMMON,
        **OF_TEMPLATE,
        "input": ("another", {}),
        "instructions": ("be brief", {}),
        "max_output_tokens": (5, {}),
        "top_logprobs": (2, {}),
        "include": (["message.output_text.logprobs"], {}),
        "return_tokens_as_token_ids": (True, {"top_logprobs": 2}),
        "text": ({"format": {"type": "json_object"}}, {}),
        "reasoning": ({"effort": "high"}, {}),
        "tool_choice": ("required", {}),
        "parallel_tool_calls": (False, {}),
        "metadata": ({"a": "b"}, {}),
        "store": (True, {}),
        # Refused, since a response is one text.
        "n": (2, {}),
        "use_beam_search": (True, {}),
        "prompt_logprobs": (1, {}),
        "return_token_ids": (True, {}),
    },
}
ELSEWHERE = {
    "spaces_between_special_tokens",  # tests/server/routes/test_token_texts.py
    "early_stopping",  # tests/engine/test_beam_search.py
    "stream_options",  # of a response, which always tells its usage
}
NO_EFFECT: dict[str, dict[str, Any]] = {
    path: {name: "x" for name in WITHOUT_EFFECT - {"store"}} | {"user": "x"} for path in BASES
}
for _path in (COMPLETIONS, CHAT):
    NO_EFFECT[_path] |= {"metadata": {"a": "b"}, "store": True}
NO_EFFECT[CHAT]["parallel_tool_calls"] = False
# Of a search, which is refused there.
NO_EFFECT[RESPONSES]["length_penalty"] = 2

BODIES: dict[str, type[GenerationBody]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatCompletionRequest,
    RESPONSES: ResponsesRequest,
}


@pytest.fixture
async def server(markov_dir: MakeMarkov) -> AsyncIterator[WholeServer]:
    template = CHAT_TEMPLATE + "{{ mood }}{{ reasoning_effort }}"
    directory = markov_dir(table=random_table(), add_bos=True, chat_template=template)
    async with whole_server(directory, trust_request_chat_template=True) as opened:
        yield opened


async def observe(server: WholeServer, path: str, **fields: Any) -> Any:
    """All that an answer says except what differs every time."""
    response = await server.client.post(path, json=fields)
    assert response.status_code < 500, response.text
    request_id = response.headers["x-request-id"]
    seen = [response.status_code, request_id if request_id == "chosen" else None]
    if fields.get("stream"):
        return [*seen, response.headers["content-type"], response.text.count('"usage":')]
    answer = response.json()
    for name in ("id", "created", "created_at"):
        answer.pop(name, None)
    for item in answer.get("output", ()):
        item.pop("id")
    return [*seen, answer]


@pytest.mark.parametrize("path", BASES)
def test_every_field_is_known_here(path: str) -> None:
    known = CASES[path].keys() | NO_EFFECT[path].keys() | ELSEWHERE
    assert not CASES[path].keys() & NO_EFFECT[path].keys()
    assert BODIES[path].model_fields.keys() <= known


@pytest.mark.parametrize("path", BASES)
async def test_every_field_changes_the_answer(server: WholeServer, path: str) -> None:
    # The first request fills the prefix cache, from which all the others are served.
    await observe(server, path, **BASES[path])
    ignored = []
    for name, (value, more) in CASES[path].items():
        body = BASES[path] | SEEDED | more
        without, given = [
            await observe(server, path, **fields) for fields in (body, body | {name: value})
        ]
        if without == given:
            ignored.append(name)
    assert not ignored
    assert await server.is_idle()


@pytest.mark.parametrize("path", BASES)
async def test_fields_without_effect_change_nothing(server: WholeServer, path: str) -> None:
    body = BASES[path] | SEEDED
    await observe(server, path, **body)
    expected = await observe(server, path, **body)
    for name, value in NO_EFFECT[path].items():
        assert await observe(server, path, **body, **{name: value}) == expected, name
