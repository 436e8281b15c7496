"""Fields of the two routes that generate: what is refused, and under which name."""

import logging
from typing import Any

import pytest

from octavo.engine.core.errors import InvalidRequestError, RequestError, UnsupportedParameterError
from octavo.server.protocol.chat import ChatCompletionRequest
from octavo.server.protocol.completion import CompletionRequest
from octavo.server.validation.fields import validate_fields
from octavo.server.validation.json_body import parse_json_object

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return validate_fields(ChatCompletionRequest, {"messages": [USER], **fields})


def completion(**fields: Any) -> CompletionRequest:
    return validate_fields(CompletionRequest, fields)


WRONG_ON_BOTH = [
    ("temperature", [-0.1, 2.5, "1", True, [1]]),
    ("top_p", [-0.1, 1.5, "x"]),
    ("min_p", [-0.1, 1.5]),
    ("top_k", [-2, 1.5, "3", True]),
    ("presence_penalty", [-2.1, 2.1, False]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("repetition_penalty", [0, -1]),
    ("n", [0, -1, 129, "2", 2.5, True]),
    ("max_tokens", [-1, 1.5, "abc", True]),
    ("min_tokens", [-1, 0.5]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "1"]),
    ("stop", ["", [""], ["a", ""], [1], 1, {}, ["x"] * 65, "x" * 1001, ["x", "y" * 1001]]),
    ("stop_token_ids", [[-1], ["1"], 5]),
    ("allowed_token_ids", [[], [-1]]),
    ("bad_words", [[""], "x", ["x"] * 129, ["x", "y" * 1001]]),
    ("stream", [1, "true"]),
    ("stream_options", [True, {"include_usage": True}]),
    ("user", [5]),
    ("metadata", [[], "x", {"a": 1}, {"a": None}, {"a": {}}, {"a": ["b"]}]),
    ("metadata", [{"k" * 65: ""}, {"k": "v" * 513}, {str(i): "" for i in range(17)}]),
    ("cache_salt", ["", 5]),
    ("request_id", ["", "a b", "a\nb", "x" * 129, 5]),
    ("truncate_prompt_tokens", [0, -2, 1.5]),
    ("truncation_side", ["middle"]),
    ("prompt_logprobs", [-1, 1.5, True]),
    ("priority", [1.5, "high"]),
    ("model", [5]),
    ("ignore_eos", [1]),
    ("skip_special_tokens", ["no"]),
    ("return_token_ids", [0]),
    ("logit_bias", [[], {"-1": 1}, {"abc": 1}, {"1.5": 1}, {" 7": 1}, {"1" * 20: 1}]),
    ("logit_bias", [{"1": 1, "01": 2}]),
    ("length_penalty", [20.5, -20.5, "1"]),
    ("logit_bias", [{"1": 101}, {"1": "x"}, {"1": None}, {"1": True}, {"٣": 1}]),
]


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG_ON_BOTH for value in values]
)
def test_b02_wrong_values_name_their_field(make: Any, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make(**{name: value})
    assert caught.value.param == name
    assert f"`{name}" in caught.value.message


@pytest.mark.parametrize("value", ["maybe", 1, 0, [], {}])
def test_all_values_of_early_stopping_are_named(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(early_stopping=value)
    assert caught.value.param == "early_stopping"
    assert caught.value.message == '`early_stopping` must be true, false or "never"'


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 0, "top_k": 0},
        {"temperature": 2, "top_p": 1, "top_k": -1, "min_p": 1},
        {"top_k": 1_000_000_000, "seed": -(2**63), "n": 128},
        {"seed": 2**63 - 1, "stop": ["x" * 1000] * 64, "stop_token_ids": []},
        {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": True}},
        {
            "metadata": {"k" * 64: "v" * 512},
            "store": True,
            "service_tier": "auto",
            "safety_identifier": "x",
        },
        {"prediction": {}, "verbosity": "low", "moderation": 1, "frobnicate": 1},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {}},
        {"logit_bias": {"0": -100, "65": 100.0}},
        {"truncate_prompt_tokens": -1, "truncation_side": "right"},
        {"bad_words": ["x" * 1000] * 128, "early_stopping": "never"},
    ],
)
def test_values_in_range_are_taken(make: Any, fields: dict[str, Any]) -> None:
    make(**fields)


NEUTRAL = {
    "suffix": ["", None],
    "functions": [[]],
    "function_call": ["none"],
    "modalities": [["text"]],
    "documents": [[]],
    "logits_processors": [[]],
    "typical_p": [1, 1.0],
    "mirostat": [0],
    "dry_multiplier": [0, 0.0],
    "xtc_probability": [0],
    "response_format": [{"type": "text"}],
    "structured_outputs": [None],
    "guided_json": [None],
}


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NEUTRAL.items() for value in values]
)
def test_neutral_values_of_unsupported_fields_count_as_absent(
    make: Any, name: str, value: Any
) -> None:
    make(**{name: value})


UNSUPPORTED = {
    "suffix": "x",
    "functions": [{}],
    "function_call": "auto",
    "audio": {},
    "modalities": ["text", "audio"],
    "web_search_options": {},
    "prompt_embeds": "AAAA",
    "documents": [{}],
    "logits_processors": ["x"],
    "custom_logit_processor": "x",
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "structured_outputs": {"regex": "a"},
    "response_format": {"type": "json_object"},
    "typical_p": 0.9,
    "mirostat": 2,
    "mirostat_tau": 5,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "stop_regex": "a",
    "lora_path": "a",
    "kv_transfer_params": {"a": 1},
}


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items())
def test_unsupported_fields_are_named(make: Any, name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        make(**{name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    if name.startswith("guided"):
        assert "structured_outputs" in caught.value.message


def test_settings_beside_a_neutral_switch_are_taken() -> None:
    completion(mirostat=0, mirostat_tau=5, mirostat_eta=0.1, dry_multiplier=0, dry_base=1.75)


def test_b11_max_completion_tokens_belongs_to_chat() -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        completion(max_completion_tokens=50)
    assert caught.value.param == "max_completion_tokens"
    assert "max_tokens" in caught.value.message
    assert chat(max_tokens=9, max_completion_tokens=4).wanted_tokens == 4


def test_no_tools_are_as_good_as_none() -> None:
    assert chat(tools=[], parallel_tool_calls=False).messages == [USER]


def test_b11_null_is_absent() -> None:
    names = (
        *("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "stream_options"),
        *("tools", "tool_choice", "response_format", "user", "max_tokens", "logprobs"),
        *("top_logprobs", "metadata", "audio", "best_of"),
    )
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": [USER] * 100 + [1] * 4900}, "messages"),
        ({"messages": [{"role": "banana", "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
        ({"messages": [{"role": "assistant"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "10"}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"tool_choice": "none"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"best_of": 3}, "best_of"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"echo": True}, "echo"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            "continue_final_message",
        ),
    ],
)
def test_chat_fields_that_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_b10_assistant_turns_with_tool_calls_need_no_content(content: dict[str, Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    turn = {"role": "assistant", "tool_calls": [call], **content}
    messages = [USER, turn, {"role": "tool", "tool_call_id": "c1", "content": "10"}]
    assert chat(messages=messages).messages == messages


def test_messages_keep_what_only_a_template_knows() -> None:
    messages = [{"role": "user", "content": "hi", "name": "n", "mood": {"deep": [1]}}]
    assert chat(messages=messages).messages == messages


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[1], []], [1.5], [1, "a"], ["a", 1], [True], [[1, True]], [[1], "a"], {}, 5, True],
)
def test_b05_prompts_that_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "batch"),
    [
        ("", [""]),
        ("a", ["a"]),
        (["a", ""], ["a", ""]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (None, [""]),
    ],
)
def test_b05_prompts_become_a_batch(prompt: Any, batch: Any) -> None:
    assert completion(prompt=prompt).prompt == batch


def test_at_most_1024_prompts() -> None:
    assert len(completion(prompt=["a"] * 1024).prompt) == 1024
    with pytest.raises(InvalidRequestError):
        completion(prompt=["a"] * 1025)


@pytest.mark.parametrize(
    "fields",
    [{"n": 5, "best_of": 1}, {"best_of": 3, "stream": True}, {"best_of": 21}, {"best_of": 0}],
)
def test_b12_best_of_that_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.param == "best_of"


def test_prompt_logprobs_are_not_streamed() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt_logprobs=1, stream=True)
    assert caught.value.param == "prompt_logprobs"


def test_errors_quote_nothing_that_the_client_sent() -> None:
    secret = "s3cret"
    bodies: list[dict[str, Any]] = [
        {"temperature": secret},
        {"logit_bias": {secret: 1}},
        {"stop": [secret, 5]},
        {"chat_template_kwargs": secret},
        {"messages": [{"role": secret, "content": secret}]},
        {"messages": [{"role": "user", "content": [{"type": secret}]}]},
        {"stream_options": {secret: 1, "include_usage": secret}},
    ]
    for body in bodies:
        with pytest.raises(RequestError) as caught:
            chat(**body)
        assert secret not in caught.value.message


def test_unknown_fields_are_logged_once_per_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.server.validation.fields")
    for _ in range(2):
        completion(never_seen_before=1, store=True)
    assert [record.getMessage() for record in caplog.records] == [
        "Ignoring the unknown request field 'never_seen_before'"
    ]


@pytest.mark.parametrize("field", ["seed", "n", "top_k", "max_tokens"])
def test_an_integer_beyond_64_bits_is_said_to_be_one(field: str) -> None:
    body = parse_json_object(b'{"%b": 1%b}' % (field.encode(), b"0" * 40))
    with pytest.raises(InvalidRequestError) as caught:
        completion(**body)
    assert caught.value.param == field
    assert "64 bits" in caught.value.message
