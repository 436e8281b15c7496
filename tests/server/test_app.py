"""The application as a whole: start, refusals, order of checks, death and drain."""

import asyncio
import json
import logging
import threading

import httpx
import pytest
from octavo_fixtures import byte_ids, token_id
from served_app import ServeApp, ServedApp

from octavo.engine.core.errors import CheckpointError
from octavo.server.async_engine import AsyncEngine
from octavo.server.lifecycle import Phase

HELLO = [*byte_ids("hello"), token_id("<|eos|>")]
ENDLESS = byte_ids("ab" * 300)
PROMPT = {"prompt": "abc", "max_tokens": 10, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def error_of(answer: httpx.Response) -> dict[str, str | None]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def complete(served: ServedApp, **body: object) -> httpx.Response:
    return await served.client.post("/v1/completions", json=PROMPT | body)


async def test_g05_everything_is_503_until_ready(serve_app: ServeApp) -> None:
    loading = threading.Event()
    async with serve_app(HELLO, before_load=loading.wait) as served:
        async with asyncio.timeout(5):
            while "tea" not in served.state.lifecycle.progress:
                await asyncio.sleep(0.005)
        health = await served.client.get("/health")
        models = await served.client.get("/v1/models")
        chat = await served.client.post("/v1/chat/completions", json=CHAT)
        loading.set()
        await served.wait_for(Phase.READY)
        ready = await served.client.get("/health")
        answer = await served.client.post("/v1/chat/completions", json=CHAT)

    assert health.status_code == 503 and int(health.headers["retry-after"]) >= 1
    assert health.json() == {"status": "starting", "progress": "reading tea leaves (0 s)"}
    for refused in (models, chat):
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert error_of(refused)["code"] == "server_starting"
        assert "reading tea leaves" in str(error_of(refused)["message"])
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
    assert answer.json()["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/ready", "/ping"])
async def test_all_probes_say_the_same(serve_app: ServeApp, path: str) -> None:
    async with serve_app(HELLO) as served:
        await served.wait_for(Phase.READY)
        answer = await served.client.get(path)
        steps = served.executor.num_steps

    assert (answer.status_code, answer.json(), steps) == (200, {"status": "ready"}, 0)


async def test_health_generate_runs_the_model(serve_app: ServeApp) -> None:
    async with serve_app(HELLO) as served:
        await served.wait_for(Phase.READY)
        answer = await served.client.get("/health_generate")

        assert answer.status_code == 200
        assert served.executor.num_steps > 0


async def test_a_failed_load_is_told_in_one_line(
    serve_app: ServeApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def fail() -> None:
        raise CheckpointError("model.safetensors: damaged")

    async with serve_app(HELLO, before_load=fail) as served:
        await served.wait_for(Phase.FAILED)
        health = await served.client.get("/health")

    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage() == "model.safetensors: damaged"
    assert record.exc_info is None


@pytest.mark.parametrize("given", [None, "client-7", "bad id", "x" * 200])
async def test_every_answer_has_a_request_id(serve_app: ServeApp, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    async with serve_app(HELLO, api_key=("k",)) as served:
        await served.wait_for(Phase.READY)
        key = {"Authorization": "Bearer k"}
        answers = [
            await served.client.get("/version", headers=headers),
            await served.client.get("/health", headers=headers),
            await served.client.get("/nothing", headers=headers | key),
            await served.client.post("/v1/completions", headers=headers | key, json=PROMPT),
            await served.client.post("/v1/completions", headers=headers | key, content=b"{"),
        ]

    ids = [answer.headers["x-request-id"] for answer in answers]
    if given == "client-7":
        assert set(ids) == {given}
    else:
        assert len(set(ids)) == len(ids) and given not in ids


async def test_a_fresh_id_differs_from_the_body_id(serve_app: ServeApp) -> None:
    async with serve_app(HELLO) as served:
        await served.wait_for(Phase.READY)
        answer = await complete(served)

    assert answer.json()["id"] != answer.headers["x-request-id"]


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_above_the_limit_is_413(serve_app: ServeApp, declared: bool) -> None:
    async def pieces():
        for _ in range(20):
            yield b" " * 100

    content = b" " * 2000 if declared else pieces()
    async with serve_app(HELLO, max_body_size=1000) as served:
        await served.wait_for(Phase.READY)
        answer = await served.client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        after = await complete(served)

    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")
    assert after.status_code == 200


async def test_a_body_at_the_limit_is_read(serve_app: ServeApp) -> None:
    body = json.dumps(PROMPT).encode()
    async with serve_app(HELLO, max_body_size=len(body)) as served:
        await served.wait_for(Phase.READY)
        answer = await served.client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )

    assert answer.status_code == 200


async def test_checks_come_in_the_promised_order(serve_app: ServeApp) -> None:
    """Each request has all later faults too; only the first one is told."""
    big = b"{" * 2000
    key = {"Authorization": "Bearer k"}
    json_type = {"content-type": "application/json"}
    loading = threading.Event()
    async with serve_app(
        ENDLESS,
        before_load=loading.wait,
        api_key=("k",),
        max_body_size=1000,
        max_num_seqs=1,
        max_num_queued_reqs=0,
    ) as served:
        post = served.client.post
        statuses = [
            (await post("/nothing", content=big)).status_code,
            (await post("/nothing", content=big, headers=key)).status_code,
            (await post("/v1/models", content=big, headers=key)).status_code,
            (await post("/v1/completions", content=big, headers=key)).status_code,
        ]
        loading.set()
        await served.wait_for(Phase.READY)
        served.executor.gate.clear()
        running = asyncio.create_task(post("/v1/completions", json=PROMPT, headers=key))
        while served.state.require_serving().admission.num_accepted == 0:
            await asyncio.sleep(0.005)
        statuses.append((await post("/v1/completions", content=big, headers=key)).status_code)
        served.executor.gate.set()
        await running
        statuses += [
            (await post("/v1/completions", content=big, headers=key)).status_code,
            (await post("/v1/completions", content=big, headers=key | json_type)).status_code,
            (await post("/v1/completions", content=b"{", headers=key | json_type)).status_code,
        ]

    assert statuses == [401, 404, 405, 503, 429, 415, 413, 400]


async def test_g09_the_queue_is_bounded(serve_app: ServeApp) -> None:
    async with serve_app(HELLO, max_num_seqs=1, max_num_queued_reqs=4) as served:
        await served.wait_for(Phase.READY)
        served.executor.gate.clear()
        tasks = [
            asyncio.create_task(
                complete(served, stream=bool(number % 2), n=3 if number == 0 else 1)
            )
            for number in range(20)
        ]
        refused: list[httpx.Response] = []
        async with asyncio.timeout(10):
            for done in asyncio.as_completed(tasks):
                refused.append(await done)
                if len(refused) == 15:
                    break
        assert served.state.require_serving().admission.num_accepted == 5
        served.executor.gate.set()
        answers = await asyncio.gather(*tasks)
        later = await complete(served)

    for answer in refused:
        assert answer.status_code == 429
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["retry-after"]) >= 1
        assert error_of(answer)["code"] == "queue_full"
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 15
    assert later.status_code == 200


async def test_g09_a_waiting_request_that_leaves_frees_its_place(serve_app: ServeApp) -> None:
    async with serve_app(ENDLESS, max_num_seqs=1, max_num_queued_reqs=0) as served:
        await served.wait_for(Phase.READY)
        served.executor.gate.clear()
        task = asyncio.create_task(complete(served))
        while served.state.require_serving().admission.num_accepted == 0:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait((task,))

        assert served.state.require_serving().admission.num_accepted == 0


async def test_f08_a_dead_engine_answers_503_at_once(serve_app: ServeApp) -> None:
    async with serve_app(ENDLESS) as served:
        await served.wait_for(Phase.READY)
        served.executor.step_seconds = 0.01
        tasks = [
            asyncio.create_task(complete(served, stream=number % 2 == 0, max_tokens=400))
            for number in range(9)
        ]
        while served.executor.num_steps < 5:
            await asyncio.sleep(0.005)
        served.executor.fail_with = ValueError("secret detail")
        async with asyncio.timeout(5):
            answers = await asyncio.gather(*tasks)
        await served.wait_for(Phase.FAILED)
        health = await served.client.get("/health")
        refused = await complete(served)

    for number, answer in enumerate(answers):
        if number % 2 == 0:
            *_, last = answer.text.strip().split("\n\n")
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
            assert "[DONE]" not in answer.text
        else:
            assert answer.status_code == 503
            assert error_of(answer)["code"] == "engine_dead"
        assert "secret" not in answer.text
    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_dead")


async def test_f08_the_watchdog_ends_a_step_that_hangs(
    serve_app: ServeApp, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_app(HELLO, watchdog_timeout=0.1) as served:
        await served.wait_for(Phase.READY)
        served.executor.gate.clear()
        async with asyncio.timeout(5):
            answer = await complete(served, prompt="xyzzy", stop=["plugh"], max_tokens=7)
        await served.wait_for(Phase.FAILED)

    assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_dead")
    # The log says where the engine hung and what it was asked, in settings and not in words.
    assert "gate.wait()" in caplog.text
    assert "max_tokens=7" in caplog.text and "stop=1 given" in caplog.text
    assert "xyzzy" not in caplog.text and "plugh" not in caplog.text


async def test_an_idle_engine_never_trips_the_watchdog(serve_app: ServeApp) -> None:
    async with serve_app(HELLO, watchdog_timeout=0.02) as served:
        await served.wait_for(Phase.READY)
        await asyncio.sleep(0.1)
        answer = await complete(served)

    assert answer.status_code == 200


async def test_a_process_that_stood_still_does_not_trip_the_watchdog(
    serve_app: ServeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after a stop of the whole machine: the step looks old once, and then it goes on.
    ages = [0.0, 1000.0]
    monkeypatch.setattr(AsyncEngine, "step_seconds", lambda _: ages.pop() if ages else 0.0)
    async with serve_app(HELLO, watchdog_timeout=0.02) as served:
        await served.wait_for(Phase.READY)
        async with asyncio.timeout(5):
            while ages:
                await asyncio.sleep(0.01)
        answer = await complete(served)

    assert answer.status_code == 200


async def test_request_timeout_is_408(serve_app: ServeApp) -> None:
    async with serve_app(ENDLESS, request_timeout=0.05) as served:
        await served.wait_for(Phase.READY)
        served.executor.step_seconds = 0.01
        answer = await complete(served, max_tokens=400)
        await served.idle()

    assert (answer.status_code, error_of(answer)["code"]) == (408, "request_timeout")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("limit", "code"), [("request_timeout", "request_timeout"), ("queue_timeout", "queue_timeout")]
)
async def test_a_stream_that_has_begun_is_told_of_its_time_limit(
    serve_app: ServeApp, limit: str, code: str
) -> None:
    # The comment sends the headers while the request still waits.
    async with serve_app(ENDLESS, sse_keep_alive=0.02, **{limit: 0.3}) as served:
        await served.wait_for(Phase.READY)
        served.executor.step_seconds = 0.01
        if limit == "queue_timeout":
            served.executor.gate.clear()
        answer = await complete(served, max_tokens=400, stream=True)
        served.executor.gate.set()
        await served.idle()

    assert answer.status_code == 200
    *before, last = answer.text.strip().split("\n\n")
    assert before and json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert "[DONE]" not in answer.text and '"finish_reason":"' not in answer.text


async def test_a_request_that_waited_too_long_is_503_and_no_refusal(serve_app: ServeApp) -> None:
    async with serve_app(HELLO, queue_timeout=0.05) as served:
        await served.wait_for(Phase.READY)
        served.executor.gate.clear()
        plain, stream = await asyncio.gather(complete(served), complete(served, stream=True))
        served.executor.gate.set()
        metrics = (await served.client.get("/metrics")).text

    for answer in (plain, stream):
        assert (answer.status_code, error_of(answer)["code"]) == (503, "queue_timeout")
        assert int(answer.headers["retry-after"]) >= 1
    assert 'requests_timed_out_total{engine="0",model_name="fake",stage="queue"} 2.0' in metrics
    assert 'requests_rejected_total{engine="0",model_name="fake",reason="not_ready"} 0.0' in metrics


@pytest.mark.parametrize(("header", "status"), [("0.05", 408), ("60", 200)])
async def test_a_client_may_limit_its_own_request(
    serve_app: ServeApp, header: str, status: int
) -> None:
    script = ENDLESS if status == 408 else HELLO
    async with serve_app(script, request_timeout=30) as served:
        await served.wait_for(Phase.READY)
        served.executor.step_seconds = 0.005
        answer = await served.client.post(
            "/v1/completions",
            json=PROMPT | {"max_tokens": 400},
            headers={"x-request-timeout": header},
        )

    assert answer.status_code == status


@pytest.mark.parametrize("header", ["0", "-1", "nan", "inf", "soon", ""])
async def test_a_time_limit_that_is_none_is_400(serve_app: ServeApp, header: str) -> None:
    async with serve_app(HELLO) as served:
        await served.wait_for(Phase.READY)
        answer = await served.client.post(
            "/v1/completions", json=PROMPT, headers={"x-request-timeout": header}
        )

    assert answer.status_code == 400
    assert "x-request-timeout" in str(error_of(answer)["message"])


@pytest.mark.parametrize("options", [{}, {"stream_options": {"continuous_usage_stats": True}}])
async def test_usage_can_be_forced_into_streams(
    serve_app: ServeApp, options: dict[str, object]
) -> None:
    async with serve_app(HELLO, enable_force_include_usage=True) as served:
        await served.wait_for(Phase.READY)
        answer = await complete(served, stream=True, **options)
        plain = await complete(served)

    *_, usage, done = answer.text.strip().split("\n\n")
    assert json.loads(usage.removeprefix("data: "))["usage"] == plain.json()["usage"]
    assert done == "data: [DONE]"


async def test_drain_lets_accepted_requests_end(serve_app: ServeApp) -> None:
    async with serve_app(HELLO) as served:
        await served.wait_for(Phase.READY)
        served.executor.step_seconds = 0.01
        task = asyncio.create_task(complete(served))
        while served.executor.num_steps == 0:
            await asyncio.sleep(0.005)
        drain = asyncio.create_task(served.app.state.supervisor.drain())
        await asyncio.sleep(0)
        health = await served.client.get("/health")
        refused = await complete(served)
        answer = await task
        async with asyncio.timeout(5):
            await drain

    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    assert (refused.status_code, error_of(refused)["code"]) == (503, "server_draining")
    assert "retry-after" in refused.headers
    assert answer.json()["choices"][0]["text"] == "hello"


async def test_drain_ends_the_late_ones_with_an_error(serve_app: ServeApp) -> None:
    async with serve_app(ENDLESS, shutdown_timeout=0.1) as served:
        await served.wait_for(Phase.READY)
        served.executor.step_seconds = 0.01
        plain = asyncio.create_task(complete(served, max_tokens=400))
        stream = asyncio.create_task(complete(served, max_tokens=400, stream=True))
        while served.executor.num_steps < 3:
            await asyncio.sleep(0.005)
        async with asyncio.timeout(5):
            await served.app.state.supervisor.drain()
            answers = await asyncio.gather(plain, stream)

    assert (answers[0].status_code, error_of(answers[0])["code"]) == (503, "server_draining")
    last = answers[1].text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_draining"


async def test_the_statistics_line_comes_only_with_traffic(
    serve_app: ServeApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serve_app(HELLO, log_stats_interval=0.05) as served:
        await served.wait_for(Phase.READY)
        await asyncio.sleep(0.2)
        quiet = "generation" in caplog.text
        await complete(served)
        async with asyncio.timeout(5):
            while "generation" not in caplog.text:
                await asyncio.sleep(0.01)

    assert not quiet


async def test_the_access_log_leaves_out_what_it_is_told(
    serve_app: ServeApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serve_app(HELLO, disable_access_log_for_endpoints=("/version",)) as served:
        await served.client.get("/version")
        await served.client.get("/version%0d%0aforged")

    lines = [r.getMessage() for r in caplog.records if r.name == "octavo.access"]
    assert len(lines) == 1
    assert lines[0].startswith("GET /version??forged 404 ")


async def test_polled_paths_are_logged_at_debug_unless_refused(
    serve_app: ServeApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve_app(HELLO, api_key=("k",)) as served:
        await served.client.get("/health")
        await served.client.get("/metrics", headers={"Authorization": "Bearer k"})
        await served.client.get("/metrics")

    levels = [r.levelname for r in caplog.records if r.name == "octavo.access"]
    assert levels == ["DEBUG", "DEBUG", "INFO"]


async def test_docs_can_be_switched_off(serve_app: ServeApp) -> None:
    async with serve_app(HELLO, disable_fastapi_docs=True) as served:
        statuses = [
            (await served.client.get(path)).status_code
            for path in ("/docs", "/redoc", "/openapi.json")
        ]

    assert statuses == [404, 404, 404]


async def test_no_request_needs_a_thread_of_the_pool(serve_app: ServeApp) -> None:
    """A busy pool must keep neither probes nor metrics waiting."""
    async with serve_app(HELLO, enable_admin=True, admin_key="root") as served:
        await served.wait_for(Phase.READY)
        before = {thread.name for thread in threading.enumerate()}
        for path in ("/health", "/ping", "/metrics", "/version", "/v1/models"):
            await asyncio.gather(*(served.client.get(path) for _ in range(20)))

        assert {thread.name for thread in threading.enumerate()} <= before
