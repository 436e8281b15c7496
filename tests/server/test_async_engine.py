"""Streams of the engine: text, joining, aborts, time limits, and the engine's death."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_engine import NUM_BLOCKS, ScriptedExecutor, fake_loader
from octavo_fixtures import byte_ids, token_id

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.core.errors import (
    ContextLengthError,
    EngineDeadError,
    NotReadyError,
    RequestFailedError,
    RequestTimeoutError,
)
from octavo.engine.core.messages import Message, ResetPrefixCache
from octavo.engine.core.request import FinishReason
from octavo.engine.core.request_output import SequenceDelta
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.engine_loop import Heartbeat
from octavo.engine.output_processor import ChoiceOutput, ProcessedOutputs
from octavo.engine.tokenizer import Tokenizer
from octavo.server import async_engine
from octavo.server.async_engine import AsyncEngine, OnFatal, OnStep
from octavo.server.engine_stream import GenerateRequest
from octavo.server.metrics import ServerMetrics
from octavo.server.time_limits import TimeLimits

EOS = token_id("<|eos|>")
HELLO = [*byte_ids("hello"), EOS]
ENDLESS = byte_ids("ab" * 300)


class Rig:
    def __init__(self, engine: AsyncEngine, executor: ScriptedExecutor, deaths: list[str]) -> None:
        self.engine = engine
        self.executor = executor
        self.deaths = deaths
        self.metrics = engine._metrics
        self._count = 0

    def request(self, prompt: str = "abc", **params: Any) -> GenerateRequest:
        self._count += 1
        values = {"max_tokens": 100, "temperature": 0.0} | params
        return GenerateRequest(f"r{self._count}", tuple(byte_ids(prompt)), SamplingParams(**values))

    async def outputs(self, request: GenerateRequest) -> list[ChoiceOutput]:
        return [output async for batch in self.engine.generate(request) for output in batch]

    async def text(self, request: GenerateRequest) -> str:
        return "".join(output.text for output in await self.outputs(request))

    def sample(self, name: str, **labels: str) -> float:
        value = self.metrics._registry.get_sample_value(
            name, {"model_name": "", "engine": "0", **labels}
        )
        return value or 0.0

    async def idle(self) -> None:
        """Wait until the engine holds nothing."""
        async with asyncio.timeout(5):
            while self.engine.stats().num_used_blocks or self.engine.stats().num_running:
                await asyncio.sleep(0.005)

    async def died(self) -> None:
        """Wait for the news of the engine's death, which may follow the last errors."""
        async with asyncio.timeout(5):
            while not self.deaths:
                await asyncio.sleep(0.005)


Open = Callable[..., Any]


@pytest.fixture
async def rig(byte_bpe_dir: Path) -> AsyncIterator[Open]:
    @asynccontextmanager
    async def open_rig(script: list[int], **options: Any) -> AsyncIterator[Rig]:
        executor = ScriptedExecutor(script)
        loaded = fake_loader(byte_bpe_dir, executor)(ServerConfig(), EngineConfig(), str.strip)
        deaths: list[str] = []
        engine = AsyncEngine(
            loaded.make_thread,
            loaded.model.tokenizer,
            ServerMetrics(),
            on_dead=deaths.append,
            **options,
        )
        engine.start()
        try:
            yield Rig(engine, executor, deaths)
        finally:
            executor.gate.set()
            await engine.shutdown(5)

    yield open_rig


async def test_a_request_becomes_text_and_ends_once(rig: Open) -> None:
    async with rig(HELLO) as r:
        outputs = await r.outputs(r.request())

    assert "".join(output.text for output in outputs) == "hello"
    reasons = [output.finish_reason for output in outputs if output.finish_reason]
    assert reasons == [FinishReason.STOP]
    assert outputs[-1].num_output_tokens == 6


async def test_all_choices_end(rig: Open) -> None:
    async with rig(HELLO) as r:
        outputs = await r.outputs(r.request(n=3))

    ends = [output.index for output in outputs if output.finish_reason]
    assert sorted(ends) == [0, 1, 2]


async def test_many_requests_at_once(rig: Open) -> None:
    async with rig(HELLO) as r:
        texts = await asyncio.gather(*(r.text(r.request()) for _ in range(40)))

    assert texts == ["hello"] * 40


async def test_waiting_outputs_of_a_slow_reader_are_joined(rig: Open) -> None:
    async with rig(HELLO) as r, aclosing(r.engine.generate(r.request())) as batches:
        r.executor.pause_after = 1
        first = await anext(batches)
        r.executor.gate.set()
        async with asyncio.timeout(5):
            while r.sample("octavo:generation_tokens_total") < 6:
                await asyncio.sleep(0.005)
        rest = [batch async for batch in batches]

    assert [output.text for output in first] == ["h"]
    assert [[output.text for output in batch] for batch in rest] == [["ello"]]


async def test_a_stop_string_ends_the_work_of_the_engine(rig: Open) -> None:
    async with rig(ENDLESS) as r:
        assert await r.text(r.request(stop=("ba",), max_tokens=400)) == "a"
        await r.idle()


async def test_leaving_early_frees_the_blocks(rig: Open) -> None:
    async with rig(ENDLESS) as r:
        r.executor.step_seconds = 0.002
        async with aclosing(r.engine.generate(r.request(max_tokens=400))) as batches:
            await anext(batches)
        await r.idle()

        assert r.engine.stats().num_blocks == NUM_BLOCKS
        assert r.sample("octavo:client_disconnects_total", stage="run") == 1
        assert r.sample("octavo:request_success_total", finished_reason="abort") == 1


async def test_a_request_that_waits_can_leave(rig: Open) -> None:
    async with rig(ENDLESS) as r:
        r.executor.gate.clear()
        task = asyncio.create_task(r.outputs(r.request()))
        await asyncio.sleep(0.02)
        assert r.engine.num_waiting_tokens() == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert r.engine.num_waiting_tokens() == 0
        assert r.sample("octavo:client_disconnects_total", stage="queue") == 1


async def test_the_time_limit_ends_a_request(rig: Open) -> None:
    async with rig(ENDLESS, limits=TimeLimits(total=0.05)) as r:
        r.executor.step_seconds = 0.005
        with pytest.raises(RequestTimeoutError):
            await r.outputs(r.request(max_tokens=400))
        await r.idle()

        assert r.sample("octavo:requests_timed_out_total", stage="run") == 1
        assert r.sample("octavo:client_disconnects_total", stage="run") == 0


async def test_a_request_that_waits_too_long_is_ended_and_counted_as_waiting(rig: Open) -> None:
    async with rig(ENDLESS, limits=TimeLimits(queue=0.1)) as r:
        r.executor.gate.clear()
        with pytest.raises(NotReadyError) as caught:
            await r.outputs(r.request())
        waiting_tokens = r.engine.num_waiting_tokens()
        r.executor.gate.set()
        await r.idle()

        assert (caught.value.code, caught.value.retry_after) == ("queue_timeout", 1)
        assert waiting_tokens == 0
        assert r.sample("octavo:requests_timed_out_total", stage="queue") == 1


async def test_the_queues_limit_does_not_end_what_runs(rig: Open) -> None:
    async with rig(HELLO, limits=TimeLimits(queue=0.1)) as r:
        r.executor.step_seconds = 0.05
        text = await r.text(r.request())

    assert text == "hello"


async def test_a_long_prompt_counts_as_running_from_its_first_chunk_on(rig: Open) -> None:
    async with rig(HELLO, limits=TimeLimits(queue=0.2)) as r:
        r.executor.pause_after = 1
        task = asyncio.create_task(r.text(r.request("a" * 300)))
        await asyncio.sleep(0.4)
        r.executor.gate.set()
        text = await task

    assert text == "hello"


async def test_h01_rows_of_nan_are_counted(rig: Open) -> None:
    async with rig(HELLO) as r:
        r.executor.poison = {0}
        with pytest.raises(RequestFailedError):
            await r.outputs(r.request())
        with pytest.raises(ContextLengthError):
            await r.outputs(r.request("a" * 600))

        assert r.sample("octavo:corrupted_requests_total") == 1


async def test_a11_a_failed_row_ends_its_request_only(rig: Open) -> None:
    async with rig(HELLO) as r:
        r.executor.poison = {0}
        results = await asyncio.gather(
            r.outputs(r.request()), r.text(r.request()), return_exceptions=True
        )

    assert isinstance(results[0], RequestFailedError)
    assert results[1] == "hello"


async def test_what_the_engine_refuses_stays_the_clients_fault(rig: Open) -> None:
    async with rig(HELLO) as r:
        with pytest.raises(ContextLengthError):
            await r.outputs(r.request("x" * 600, n=2))

        assert await r.text(r.request()) == "hello"


async def test_f08_death_of_the_engine_ends_every_request(rig: Open) -> None:
    async with rig(ENDLESS) as r:
        r.executor.step_seconds = 0.002
        tasks = [asyncio.create_task(r.outputs(r.request())) for _ in range(12)]
        await asyncio.sleep(0.05)
        r.executor.fail_with = ValueError("broken")
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks, return_exceptions=True)

        assert {type(result) for result in results} == {EngineDeadError}
        await r.died()
        assert len(r.deaths) == 1 and "broken" in r.deaths[0]
        assert r.engine.stats().num_running == 0
        with pytest.raises(EngineDeadError):
            await r.outputs(r.request())


async def test_f08_a_step_that_never_ends_can_be_declared_dead(rig: Open) -> None:
    async with rig(ENDLESS) as r:
        r.executor.gate.clear()
        tasks = [asyncio.create_task(r.outputs(r.request())) for _ in range(3)]
        async with asyncio.timeout(5):
            while r.engine.step_seconds() < 0.02:
                await asyncio.sleep(0.005)
        r.engine.fail("the step hangs")
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks, return_exceptions=True)

        assert {type(result) for result in results} == {EngineDeadError}
        await r.died()
        assert r.deaths == ["the step hangs"]


async def test_the_event_loop_never_waits_for_its_own_turn(
    rig: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(ENDLESS) as r:
        waited: list[int] = []

        def wait(has_backlog: bool = False) -> None:
            waited.append(threading.get_ident())

        monkeypatch.setattr(r.engine._handoff, "wait", wait)
        task = asyncio.create_task(r.outputs(r.request(max_tokens=400)))
        while not waited:
            await asyncio.sleep(0.001)
        r.engine.fail("the step hangs")
        with pytest.raises(EngineDeadError):
            await task

        assert threading.get_ident() not in waited


async def test_a_time_limit_frees_the_engine_though_nobody_reads(rig: Open) -> None:
    async with (
        rig(ENDLESS, limits=TimeLimits(total=0.1)) as r,
        aclosing(r.engine.generate(r.request(max_tokens=400))) as batches,
    ):
        r.executor.step_seconds = 0.01
        await anext(batches)
        await r.idle()
        num_steps = r.executor.num_steps
        with pytest.raises(RequestTimeoutError):
            async for _ in batches:
                pass

    assert num_steps < 400


class LastWords:
    """An engine's thread that answers a reset and dies before the event loop has a turn."""

    heartbeat = Heartbeat()
    fatal_error: str | None = None

    def __init__(self, on_step: OnStep, on_fatal: OnFatal) -> None:
        self._on_fatal = on_fatal

    def start(self) -> None:
        """There is no thread."""

    def post(self, message: Message) -> None:
        assert isinstance(message, ResetPrefixCache) and message.reply is not None
        message.reply(True)
        self.fail("broken")

    def fail(self, reason: str) -> None:
        self.fatal_error = reason
        self._on_fatal(reason)

    def shutdown(self, timeout: float | None = None) -> bool:
        return True


async def test_an_answer_just_before_the_end_does_not_hide_the_end(byte_bpe_dir: Path) -> None:
    deaths: list[str] = []
    tokenizer = Tokenizer.from_directory(byte_bpe_dir)
    engine = AsyncEngine(LastWords, tokenizer, ServerMetrics(), on_dead=deaths.append)

    assert await engine.reset_prefix_cache()
    assert deaths == ["broken"]


async def test_a_question_during_the_shutdown_is_answered(rig: Open) -> None:
    async with rig(ENDLESS) as r:
        r.executor.gate.clear()
        stream = asyncio.create_task(r.outputs(r.request()))
        while not r.engine.step_seconds():
            await asyncio.sleep(0.001)
        question = asyncio.create_task(r.engine.reset_prefix_cache())
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await r.engine.shutdown(0.05)
            for waiting in (question, r.engine.reset_prefix_cache(), r.engine.block_map()):
                with pytest.raises(NotReadyError):
                    await waiting
        r.executor.gate.set()
        with pytest.raises(RequestFailedError):
            await stream


@pytest.mark.parametrize("with_backlog", [False, True])
async def test_a_fault_between_engine_and_streams_is_the_engines_end(
    rig: Open, monkeypatch: pytest.MonkeyPatch, with_backlog: bool
) -> None:
    if with_backlog:
        monkeypatch.setattr(async_engine, "_SLICE", 1)
    async with rig(ENDLESS) as r:

        def process(deltas: Iterable[SequenceDelta]) -> ProcessedOutputs:
            raise KeyError("lost")

        tasks = [asyncio.create_task(r.outputs(r.request())) for _ in range(3)]
        await asyncio.sleep(0)
        monkeypatch.setattr(r.engine._processor, "process", process)
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        await r.died()
        assert [type(result) for result in results] == [EngineDeadError] * 3
        assert r.deaths == ["KeyError: 'lost'"]
        with pytest.raises(EngineDeadError):
            await r.outputs(r.request())


async def test_the_engine_does_not_run_far_ahead_of_a_slow_event_loop(
    rig: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "_SLICE", 1)
    monkeypatch.setattr(async_engine, "_MAX_BACKLOG", 16)
    longest = 0
    async with rig(ENDLESS) as r:
        process = r.engine._processor.process

        def slow(deltas: Iterable[SequenceDelta]) -> ProcessedOutputs:
            nonlocal longest
            longest = max(longest, len(r.engine._backlog))
            time.sleep(0.005)
            return process(deltas)

        monkeypatch.setattr(r.engine._processor, "process", slow)
        await asyncio.gather(*(r.outputs(r.request(max_tokens=40)) for _ in range(8)))

    # What is above the limit, and the steps that were under way: of 320 deltas in all.
    assert longest < 100


async def test_all_requests_can_be_ended_with_a_reason(rig: Open) -> None:
    async with rig(ENDLESS) as r:
        r.executor.step_seconds = 0.002
        task = asyncio.create_task(r.outputs(r.request()))
        await asyncio.sleep(0.02)
        r.engine.abort_all(NotReadyError("bye", "server_draining", 1))

        with pytest.raises(NotReadyError):
            await task
        await r.idle()


async def test_g07_counts_of_a_known_load(rig: Open) -> None:
    async with rig(HELLO) as r:
        await r.outputs(r.request("abcd"))
        await r.outputs(r.request("abc", n=2))
        await r.outputs(r.request("ab", max_tokens=2))

        assert r.sample("octavo:request_success_total", finished_reason="stop") == 2
        assert r.sample("octavo:request_success_total", finished_reason="length") == 1
        assert r.sample("octavo:prompt_tokens_total") == 9
        assert r.sample("octavo:generation_tokens_total") == 6 + 12 + 2
        assert r.sample("octavo:e2e_request_latency_seconds_count") == 3
        assert r.sample("octavo:time_to_first_token_seconds_count") == 3
        assert r.sample("octavo:request_queue_time_seconds_count") == 3
        assert r.sample("octavo:inter_token_latency_seconds_count") == 5 + 10 + 1
        assert r.sample("octavo:iteration_tokens_total_sum") > 0


async def test_the_request_log_has_settings_and_no_text(
    rig: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with rig(HELLO, log_requests=True) as r:
        await r.outputs(r.request("abc", stop=("secret",), seed=7))

    assert "r1: 3 prompt tokens, max_tokens=100 temperature=0.0 seed=7 stop=1 given" in caplog.text
    assert "secret" not in caplog.text
