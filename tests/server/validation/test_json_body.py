"""Strict JSON: every spelling that a lenient parser takes is refused, whatever the field."""

import pytest

from octavo.engine.core.errors import InvalidRequestError, UnsupportedMediaTypeError
from octavo.server.validation.json_body import MAX_DEPTH, check_content_type, parse_json_object


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b"{} {}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": -1e999}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"\\udfff": 1}',
        b'{"a": "' + b"\xff" + b'"}',
        b'{"a": ' + b"[" * 20_000,
        b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        b'{"a": ' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
    ],
    ids=lambda raw: raw[:24],
)
def test_bad_bodies_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_json_object(raw)
    assert caught.value.param in (None, "a")
    assert len(caught.value.message) < 200


def test_ordinary_text_and_wide_bodies_are_taken() -> None:
    raw = b'{"pair": "\\ud83d\\ude00", "zero": "ab\\u0000cd", "wide": [%b[]]}' % (b"[]," * 5000)
    body = parse_json_object(raw)
    assert body["pair"] == "😀"
    assert body["zero"] == "ab\x00cd"
    assert len(body["wide"]) == 5001


@pytest.mark.parametrize(
    "header",
    [
        "application/json",
        "application/json; charset=utf-8",
        'Application/JSON;charset="UTF-8"',
        "application/json; charset=utf8",
    ],
)
def test_json_content_types_are_taken(header: str) -> None:
    check_content_type(header)


@pytest.mark.parametrize(
    "header",
    [None, "", "text/plain", "application/json; charset=latin-1", "application/jsonl", "json", ";"],
)
def test_other_content_types_are_refused(header: str | None) -> None:
    with pytest.raises(UnsupportedMediaTypeError):
        check_content_type(header)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"a":1}x', None),
        (b'{"a":"b"} {}', None),
        (b'{"a":"b",}', None),
        (b'{"a":1,,"b":2}', None),
        (b'{"a":,"b":2}', "a"),
        (b'{"a":}', "a"),
        (b'{"a": 1, "temperature": NaN}', "temperature"),
        (b'{"top_p" : 1e999, "a": 1}', "top_p"),
        (b'{"prompt": "a, \\"b\\": {\\ud800"}', "prompt"),
        (b'{"messages": [{"role": "user", "content": "\\udc00"}], "n": 1}', "messages"),
        (b'{"stop": ["a", "b:\\\\", Infinity', "stop"),
        ('{"prompt": "日本", "min_p": -Infinity}'.encode(), "min_p"),
        (b'{"' + b"x" * 100 + b'": NaN}', None),
        (b'{"a b": NaN}', None),
        (b"[NaN]", None),
        (b'{"a": 1, NaN', None),
        (b"{", None),
    ],
)
def test_the_field_that_is_not_valid_is_named(raw: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_json_object(raw)
    assert caught.value.param == param
    assert param is None or f"`{param}`" in caught.value.message
