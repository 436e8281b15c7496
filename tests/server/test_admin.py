"""Routes for the operator."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from octavo_fixtures import byte_ids
from pydantic import ValidationError
from served_app import ServeApp, ServedApp

from octavo.config.server import ServerConfig
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.executor.profiled import ProfiledExecutor, Recording
from octavo.server.lifecycle import Phase
from octavo.server.profiling import Profiler
from octavo.server.routes.admin import router

ENDLESS = byte_ids("ab" * 300)
ADMIN = {"Authorization": "Bearer root"}
CLIENT = {"Authorization": "Bearer client"}
CONFIG = {"enable_admin": True, "admin_key": "root"}
PATHS = [(method, route.path) for route in router.routes for method in route.methods]


async def ask(served: ServedApp, **body: object) -> httpx.Response:
    fields = {"prompt": "a" * 40, "max_tokens": 4, "temperature": 0} | body
    return await served.client.post("/v1/completions", json=fields, headers=ADMIN)


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_without_the_flag_there_are_no_such_routes(
    serve_app: ServeApp, method: str, path: str
) -> None:
    async with serve_app(admin_key="root") as served:
        answer = await served.client.request(method, path, headers=ADMIN)

    assert answer.status_code == 404


@pytest.mark.parametrize("keys", [(), ("client",)])
@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_only_the_admin_key_opens_them(
    serve_app: ServeApp, method: str, path: str, keys: tuple[str, ...]
) -> None:
    async with serve_app(ENDLESS, api_key=keys, **CONFIG) as served:
        await served.wait_for(Phase.READY)
        refused = [
            await served.client.request(method, path, headers=headers)
            for headers in ({}, CLIENT, {"Authorization": "Bearer rooty"})
        ]
        ordinary = await served.client.get("/version", headers=ADMIN)

    assert len(PATHS) >= 3
    assert {answer.status_code for answer in refused} == {401}
    assert {answer.json()["error"]["code"] for answer in refused} == {"invalid_api_key"}
    assert ordinary.status_code == 200


def test_the_routes_need_a_key_to_be_switched_on() -> None:
    with pytest.raises(ValidationError, match="--enable-admin needs --admin-key"):
        ServerConfig(enable_admin=True)


async def test_the_prefix_cache_is_reset_when_nothing_runs(serve_app: ServeApp) -> None:
    async with serve_app(ENDLESS, **CONFIG) as served:
        await served.wait_for(Phase.READY)
        await ask(served)
        await served.idle()
        hit = (await ask(served)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        await served.idle()
        reset = await served.client.post("/reset_prefix_cache", headers=ADMIN)
        miss = (await ask(served)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        # The engine stands in the middle of the request until the reset has been asked for.
        served.executor.pause_after = served.executor.num_steps + 2
        served.executor.step_seconds = 0.01
        running = asyncio.create_task(ask(served, max_tokens=100))
        async with asyncio.timeout(10):
            while served.state.require_serving().engine.stats().num_used_blocks == 0:
                await asyncio.sleep(0.005)
        refused = asyncio.create_task(served.client.post("/reset_prefix_cache", headers=ADMIN))
        await asyncio.sleep(0.05)
        served.executor.gate.set()
        await running

    assert hit > 0 and miss == 0
    assert (reset.status_code, reset.json()) == (200, {"reset": True})
    assert (await refused).json() == {"reset": False}


async def test_every_block_says_what_it_is_held_for(serve_app: ServeApp) -> None:
    async with serve_app(ENDLESS, **CONFIG) as served:
        await served.wait_for(Phase.READY)
        empty = (await served.client.get("/debug/blocks", headers=ADMIN)).json()
        served.executor.step_seconds = 0.005
        running = asyncio.create_task(ask(served, prompt=[97] * 40, max_tokens=100, n=3))
        async with asyncio.timeout(10):
            while served.state.require_serving().engine.stats().num_used_blocks < 5:
                await asyncio.sleep(0.005)
            found = (await served.client.get("/debug/blocks", headers=ADMIN)).json()
            await running

    free = {"owner": "free", "ref_count": 0, "hashed": False, "num_filled": 0}
    assert empty["blocks"] == [free] * empty["num_blocks"] and empty["waste"] == 0
    # 40 tokens: two full blocks for all three choices, and a tail for each of them.
    held = [block for block in found["blocks"] if block["ref_count"]]
    shared = {"owner": "prompt", "ref_count": 3, "hashed": True, "num_filled": 16}
    assert held.count(shared) == 2 and len(held) == found["num_used_blocks"] >= 5
    assert {block["owner"] for block in held} <= {"prompt", "output"}
    filled = sum(block["num_filled"] for block in held)
    assert found["num_wasted_slots"] == 16 * len(held) - filled
    assert found["waste"] == pytest.approx(1 - filled / (16 * len(held)))


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/reset_prefix_cache"), ("GET", "/debug/blocks")]
)
async def test_a_dying_engine_answers_what_it_was_asked(
    serve_app: ServeApp, method: str, path: str
) -> None:
    async with serve_app(ENDLESS, **CONFIG) as served:
        await served.wait_for(Phase.READY)
        served.executor.gate.clear()
        running = asyncio.create_task(ask(served))
        while served.state.require_serving().engine.step_seconds() == 0:
            await asyncio.sleep(0.005)
        asked = asyncio.create_task(served.client.request(method, path, headers=ADMIN))
        await asyncio.sleep(0.05)
        served.executor.fail_with = ValueError("broken")
        served.executor.gate.set()
        async with asyncio.timeout(5):
            answer = await asked
            await running

    assert answer.status_code == 503


class Steps:
    """An executor that does nothing."""

    num_blocks = 3
    stopped = False

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        return ModelOutput({plan.step: (1,)})

    def shutdown(self) -> None:
        self.stopped = True


def step(executor: ProfiledExecutor, number: int = 1) -> ModelOutput:
    return executor.execute_model(SchedulerOutput(number, (), (), (), ()))


def test_a_profile_covers_exactly_the_wanted_steps(tmp_path: Path) -> None:
    results: list[str | None] = []
    executor = ProfiledExecutor(Steps())
    path = tmp_path / "trace.json"
    recording = Recording(path, 2, results.append)

    assert step(executor, 7).sampled == {7: (1,)}
    assert executor.record(recording)
    assert not executor.record(recording)
    step(executor)
    assert results == []
    step(executor)

    assert results == [None]
    assert "traceEvents" in json.loads(path.read_text())
    assert executor.record(recording)


async def test_a_profile_of_an_idle_engine_is_given_up(tmp_path: Path) -> None:
    executor = ProfiledExecutor(Steps())
    profiler = Profiler(executor)
    with pytest.raises(Exception, match="in time"):
        await profiler.record(1, 0.02)

    recorded = asyncio.create_task(profiler.record(1, 30))
    await asyncio.sleep(0)
    await asyncio.to_thread(step, executor)
    path = await recorded

    assert path.is_file()
    path.unlink()
    path.parent.rmdir()
