"""The line that each request leaves in the log."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo_fixtures import byte_ids, token_id
from served_app import ServeApp

from octavo.engine.core.request import FinishReason
from octavo.server.lifecycle import Phase
from octavo.server.logs import configure_logging
from octavo.server.metrics import RequestSummary, RequestTimes
from octavo.server.request_log import request_figures

HELLO = [*byte_ids("hello"), token_id("<|eos|>")]
BODY = {"prompt": "secret words", "max_tokens": 10, "temperature": 0}


def summary(times: RequestTimes, tokens: int) -> RequestSummary:
    return RequestSummary(FinishReason.STOP, times, 5, tokens, tokens, 10, 1)


def test_figures_of_several_prompts_are_joined() -> None:
    figures = request_figures(
        [
            summary(RequestTimes(10.0, 10.5, 11.0, 12.0, 12.5), 5),
            summary(RequestTimes(10.1, 10.2, 10.9, 11.9, 13.0), 3),
        ]
    )

    assert figures == {
        "prompt_tokens": 10,
        "output_tokens": 8,
        "finish_reason": "stop",
        "queue_ms": 500.0,
        "ttft_ms": 900.0,
        "tpot_ms": 375.0,
    }


def test_times_that_never_came_are_left_out() -> None:
    waited = request_figures([summary(RequestTimes(10.0, None, None, None, 12.5), 0)])
    single = request_figures([summary(RequestTimes(10.0, 10.0, 11.0, 11.0, 11.0), 1)])

    assert request_figures([]) == {}
    assert not {"queue_ms", "ttft_ms", "tpot_ms"} & set(waited)
    assert "tpot_ms" not in single and single["ttft_ms"] == 1000.0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_line_names_key_tokens_and_times_and_no_text(
    serve_app: ServeApp,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys"
    path.write_text("alice:a-key")
    headers = {"Authorization": "Bearer a-key", "x-request-id": "mine"}
    async with serve_app(HELLO, api_key_file=str(path), enable_log_requests=True) as served:
        await served.wait_for(Phase.READY)
        await served.client.post("/v1/completions", json=BODY | {"stream": stream}, headers=headers)

    [line] = [r.getMessage() for r in caplog.records if r.name == "octavo.access"]
    assert line.startswith("POST /v1/completions 200 ")
    for part in (" mine key=alice prompt_tokens=", " output_tokens=6 finish_reason=stop queue_ms="):
        assert part in line
    assert " ttft_ms=" in line and " tpot_ms=" in line
    assert not [word for word in ("secret", "hello", "a-key") if word in caplog.text]


@pytest.fixture
def restored_logging() -> Iterator[None]:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    logging.captureWarnings(False)
    logging.getLogger().handlers[:], logging.getLogger().level = before


@pytest.mark.usefixtures("restored_logging")
def test_json_lines_carry_the_figures_as_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    fields = {"request_id": "r", "tpot_ms": 1.5, "key_name": None}
    logging.getLogger("octavo.access").info("GET %s", "/x", extra={"octavo_fields": fields})

    entry = json.loads(capsys.readouterr().err)
    assert entry.items() >= {"level": "info", "message": "GET /x", **fields}.items()
