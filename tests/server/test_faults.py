"""Faults in every phase of a step: one terminal answer each, honest health, nothing left over."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import ScriptedExecutor, fake_loader
from faulty_executor import Fault, FaultyExecutor, Stall, crash
from octavo_fixtures import byte_ids, token_id
from whole_server import COMPLETIONS, whole_server

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.worker.kv_cache import KVCache
from octavo.server.app import create_app
from octavo.server.completion_service import CompletionChunkWriter, CompletionJob
from octavo.server.lifecycle import Phase
from octavo.server.routes import generation
from octavo.server.state import AppState

TEXT = "hello over there"
SCRIPT = [*byte_ids(TEXT), token_id("<|eos|>")]
NUM_REQUESTS = 9  # three streams and three plain answers run, three wait
FAULT_STEP = 4


class Rig:
    def __init__(self, state: AppState, client: httpx.AsyncClient, faulty: FaultyExecutor) -> None:
        self.state = state
        self.client = client
        self.faulty = faulty

    async def ask(self, number: int) -> httpx.Response:
        body = {"prompt": "a" * (number + 1), "max_tokens": 40, "temperature": 0}
        return await self.client.post("/v1/completions", json=body | {"stream": number % 2 == 0})

    async def ask_all(self) -> list[httpx.Response]:
        async with asyncio.timeout(10):
            return await asyncio.gather(*(self.ask(number) for number in range(NUM_REQUESTS)))

    async def health(self) -> tuple[int, str]:
        answer = await self.client.get("/health")
        return answer.status_code, answer.json()["status"]

    async def check_nothing_is_left(self) -> None:
        serving = self.state.serving
        assert serving is not None
        async with asyncio.timeout(2):
            while (
                serving.admission.num_accepted
                or serving.engine.stats().num_used_blocks
                or serving.engine.stats().num_running
                or serving.engine.stats().num_waiting
                or serving.engine.num_waiting_tokens()
            ):
                await asyncio.sleep(0.01)
        assert not serving.engine._streams and not serving.engine._processor._requests


Open = Callable[..., Any]


@pytest.fixture
async def rig(byte_bpe_dir: Path) -> AsyncIterator[Open]:
    @contextlib.asynccontextmanager
    async def open_rig(**config: Any) -> AsyncIterator[Rig]:
        inner = ScriptedExecutor(SCRIPT)
        inner.step_seconds = 0.002
        faulty = FaultyExecutor(inner)
        load = fake_loader(byte_bpe_dir, faulty, max_num_seqs=6)
        app = create_app(ServerConfig(disable_log_stats=True, **config), EngineConfig(), load)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://octavo") as client,
        ):
            assert await app.state.octavo.lifecycle.wait_until_started() is Phase.READY
            yield Rig(app.state.octavo, client, faulty)

    yield open_rig


def outcome(answer: httpx.Response) -> str:
    """The text, or the code of the error; asserts that there is exactly one end."""
    assert "secret" not in answer.text and "Traceback" not in answer.text
    if answer.headers["content-type"].startswith("application/json"):
        body = answer.json()
        return body["error"]["code"] if "error" in body else body["choices"][0]["text"]
    assert answer.status_code == 200
    events = [part.removeprefix("data: ") for part in answer.text.strip().split("\n\n")]
    ends = [event for event in events if event == "[DONE]" or "error" in json.loads(event)]
    assert ends == events[-1:]
    if ends != ["[DONE]"]:
        chunks = [json.loads(event) for event in events[:-1]]
        assert not [c for c in chunks if c["choices"][0]["finish_reason"]]
        return json.loads(ends[0])["error"]["code"]
    return "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1])


def after_calls(number: int, original: Callable[..., Any], act: Callable[[], None]) -> Any:
    """A method that does `act` first from its call `number` on."""
    calls = 0

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > number:
            act()
        return original(self, *args, **kwargs)

    return method


def break_phase(
    phase: str, act: Callable[[], None], rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if phase == "forward":
        rig.faulty.fault = Fault(FAULT_STEP, before=act)
    elif phase == "sample":
        rig.faulty.fault = Fault(FAULT_STEP, after=act)
    else:
        name = {"schedule": "schedule", "update": "update_from_output"}[phase]
        original = getattr(Scheduler, name)
        monkeypatch.setattr(Scheduler, name, after_calls(FAULT_STEP, original, act))


PHASES = ["schedule", "forward", "sample", "update"]


@pytest.mark.parametrize("phase", PHASES)
async def test_f08_an_exception_ends_everybody_once(
    rig: Open, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    async with rig() as r:
        break_phase(phase, crash, r, monkeypatch)
        answers = await r.ask_all()
        told = time.monotonic()
        while await r.health() != (503, "failed"):
            await asyncio.sleep(0.01)
        later = await r.ask(1)
        await r.check_nothing_is_left()

    assert time.monotonic() - told < 1
    assert [outcome(answer) for answer in answers] == ["engine_dead"] * NUM_REQUESTS
    assert (later.status_code, outcome(later)) == (503, "engine_dead")


@pytest.mark.parametrize("phase", PHASES)
async def test_f08_a_stall_ends_everybody_once(
    rig: Open, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    stall = Stall()
    async with rig(watchdog_timeout=0.2) as r:
        break_phase(phase, stall, r, monkeypatch)
        try:
            answers = await r.ask_all()
            while await r.health() != (503, "failed"):
                await asyncio.sleep(0.01)
            await r.check_nothing_is_left()
        finally:
            # The step ends after all: its results must reach nobody.
            stall.released.set()
        later = await r.ask(1)

    assert [outcome(answer) for answer in answers] == ["engine_dead"] * NUM_REQUESTS
    assert (later.status_code, outcome(later)) == (503, "engine_dead")


async def test_h01_nan_in_one_row_ends_one_request(rig: Open) -> None:
    async with rig() as r:
        r.faulty.fault = Fault(FAULT_STEP, spoil=lambda number: number == 2)
        answers = await r.ask_all()
        health = await r.health()
        await r.check_nothing_is_left()
        canary = await r.ask(1)
        metrics = (await r.client.get("/metrics")).text

    outcomes = [outcome(answer) for answer in answers]
    assert sorted(outcomes) == sorted([TEXT] * (NUM_REQUESTS - 1) + ["internal_error"])
    assert health == (200, "ready") and outcome(canary) == TEXT
    assert 'corrupted_requests_total{engine="0",model_name="fake"} 1.0' in metrics


async def test_h01_nan_in_all_rows_ends_all_and_the_engine_lives(rig: Open) -> None:
    async with rig() as r:
        r.faulty.fault = Fault(0, spoil=lambda number: True)
        answers = await r.ask_all()
        health = await r.health()
        await r.check_nothing_is_left()
        r.faulty.fault = Fault()
        canary = await r.ask(1)

    assert [answer.status_code for answer in answers] == [500] * NUM_REQUESTS
    assert [outcome(answer) for answer in answers] == ["internal_error"] * NUM_REQUESTS
    assert health == (200, "ready") and outcome(canary) == TEXT


@pytest.mark.parametrize("number", [2, 3])
async def test_a_fault_in_one_text_ends_one_request(
    rig: Open, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    original = Detokenizer.__init__
    append = Detokenizer.append
    broken: set[int] = set()

    def begin(self: Detokenizer, tokenizer: Any, prompt: Any, params: Any) -> None:
        original(self, tokenizer, prompt, params)
        if tuple(prompt) == prompts[number]:
            broken.add(id(self))

    def fail(self: Detokenizer, token_ids: Any, last: bool = False) -> Any:
        if id(self) in broken:
            crash()
        return append(self, token_ids, last)

    async with rig() as r:
        assert r.state.serving is not None
        encode = r.state.serving.model.tokenizer.encode
        prompts = [tuple(encode("a" * (n + 1))) for n in range(NUM_REQUESTS)]
        monkeypatch.setattr(Detokenizer, "__init__", begin)
        monkeypatch.setattr(Detokenizer, "append", fail)
        answers = await r.ask_all()
        await r.check_nothing_is_left()
        health = await r.health()

    outcomes = [outcome(answer) for answer in answers]
    assert outcomes == ["internal_error" if n == number else TEXT for n in range(NUM_REQUESTS)]
    assert health == (200, "ready")


async def test_a_fault_in_every_text_ends_all_and_the_engine_lives(
    rig: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig() as r:
        with monkeypatch.context() as patch:
            broken = after_calls(20, Detokenizer.append, crash)
            patch.setattr(Detokenizer, "append", broken)
            answers = await r.ask_all()
            await r.check_nothing_is_left()
        health = await r.health()
        canary = await r.ask(1)

    assert [outcome(answer) for answer in answers] == ["internal_error"] * NUM_REQUESTS
    assert health == (200, "ready") and outcome(canary) == TEXT


@pytest.mark.parametrize("phase", ["detokenize", "serialise"])
async def test_a_stall_on_the_event_loop_delays_and_loses_nothing(
    rig: Open, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    owner, name = {
        "detokenize": (Detokenizer, "append"),
        "serialise": (CompletionChunkWriter, "write"),
    }[phase]
    stalls = iter([1.2] * 2)
    stall = after_calls(5, getattr(owner, name), lambda: time.sleep(next(stalls, 0)))
    monkeypatch.setattr(owner, name, stall)
    async with rig(watchdog_timeout=1) as r:
        answers = await r.ask_all()
        await r.check_nothing_is_left()
        health = await r.health()

    assert [outcome(answer) for answer in answers] == [TEXT] * NUM_REQUESTS
    assert health == (200, "ready")


async def test_an_answer_whose_writing_stalls_ends_alone(
    rig: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = CompletionJob.answer

    async def stall(self: CompletionJob, outputs: Any) -> bytes:
        if self.requests[0].prompt_token_ids == slow:
            await asyncio.Event().wait()
        return await original(self, outputs)

    monkeypatch.setattr(generation, "LAST_WORDS_S", 0.1)
    async with rig(request_timeout=3) as r:
        assert r.state.serving is not None
        slow = tuple(r.state.serving.model.tokenizer.encode("aa"))
        monkeypatch.setattr(CompletionJob, "answer", stall)
        answers = await r.ask_all()
        await r.check_nothing_is_left()
        health = await r.health()

    outcomes = [outcome(answer) for answer in answers]
    assert outcomes == [TEXT, "request_timeout", *([TEXT] * (NUM_REQUESTS - 2))]
    assert health == (200, "ready")


async def test_a_fault_while_writing_one_stream_ends_it_alone(
    rig: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = CompletionChunkWriter.write
    broken: list[CompletionChunkWriter] = []

    def write(self: CompletionChunkWriter, number: int, outputs: Any) -> bytes:
        broken[:] = broken or [self]
        if self is broken[0]:
            crash()
        return original(self, number, outputs)

    monkeypatch.setattr(CompletionChunkWriter, "write", write)
    async with rig() as r:
        transport = httpx.ASGITransport(r.client._transport.app, raise_app_exceptions=False)  # type: ignore[attr-defined]
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            r.client = client
            answers = await r.ask_all()
            await r.check_nothing_is_left()
            health = await r.health()

    outcomes = [outcome(answer) for answer in answers]
    assert sorted(outcomes) == sorted(["internal_error", *([TEXT] * (NUM_REQUESTS - 1))])
    assert health == (200, "ready")


@pytest.mark.parametrize("kind", ["raise", "stall"])
async def test_f08_a_fault_while_blocks_are_copied_ends_everybody_once(
    random_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    act = crash if kind == "raise" else Stall()
    original = KVCache.copy_blocks

    def copy(self: KVCache, copies: Any) -> None:
        if copies:
            act()
        original(self, copies)

    async with whole_server(random_llama_dir, watchdog_timeout=0.5) as server:
        monkeypatch.setattr(KVCache, "copy_blocks", copy)
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}
        try:
            async with asyncio.timeout(20):
                answers = await asyncio.gather(
                    # Two choices share the block that both will write.
                    *(server.client.post(COMPLETIONS, json=body | {"n": n}) for n in (1, 1, 2, 1))
                )
            async with asyncio.timeout(5):
                while (await server.client.get("/health")).json() != {"status": "failed"}:
                    await asyncio.sleep(0.01)
        finally:
            if isinstance(act, Stall):
                act.released.set()

    assert [outcome(answer) for answer in answers] == ["engine_dead"] * 4


@pytest.mark.parametrize("calls", [0, 3])
async def test_a_fault_while_writing_a_stream_ends_the_streams_only(
    rig: Open, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    broken = after_calls(calls, CompletionChunkWriter.write, crash)
    monkeypatch.setattr(CompletionChunkWriter, "write", broken)
    async with rig() as r:
        transport = httpx.ASGITransport(r.client._transport.app, raise_app_exceptions=False)  # type: ignore[attr-defined]
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            r.client = client
            answers = await r.ask_all()
            await r.check_nothing_is_left()
            health = await r.health()

    outcomes = [outcome(answer) for answer in answers]
    assert outcomes[0::2] == ["internal_error"] * len(outcomes[0::2])
    assert outcomes[1::2] == [TEXT] * len(outcomes[1::2])
    assert health == (200, "ready")


async def test_a_fault_while_writing_an_answer_ends_it(
    rig: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> bytes:
        await asyncio.sleep(0.01)
        raise ValueError("a secret detail")

    monkeypatch.setattr(CompletionJob, "answer", broken)
    async with rig() as r:
        answers = await r.ask_all()
        await r.check_nothing_is_left()
        health = await r.health()

    outcomes = [outcome(answer) for answer in answers]
    assert outcomes[1::2] == ["internal_error"] * len(outcomes[1::2])
    assert outcomes[0::2] == [TEXT] * len(outcomes[0::2])
    assert health == (200, "ready")


@pytest.mark.parametrize(
    "part", ["_step_tokens", "_prompt_tokens", "_generation_tokens", "_end_to_end", "_success"]
)
async def test_g07_broken_metrics_disturb_nobody(
    rig: Open, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    async with rig() as r:
        monkeypatch.setattr(getattr(r.state.metrics, part), "labels", lambda *a: crash())
        answers = await r.ask_all()
        await r.check_nothing_is_left()
        health = await r.health()

    assert [outcome(answer) for answer in answers] == [TEXT] * NUM_REQUESTS
    assert r.state.metrics.faults and health == (200, "ready")
