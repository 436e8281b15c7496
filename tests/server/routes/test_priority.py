"""The priority of a request reaches the queue."""

import asyncio
import threading
from collections.abc import Callable

from octavo_serving import TableSettings, served

from octavo.config.engine import EngineConfig

MakeSettings = Callable[..., TableSettings]

COMPLETIONS = "/v1/completions"


async def test_a_lower_number_is_served_first(drawn: MakeSettings) -> None:
    config = EngineConfig.model_validate({"scheduler": {"scheduling_policy": "priority"}})
    begun, gate = threading.Event(), threading.Event()
    ended: list[int] = []

    def hold(step: int) -> None:
        begun.set()
        gate.wait(10)

    async with served(drawn(max_num_seqs=1, engine=config)) as server, asyncio.timeout(20):
        server.executor.before_step = hold
        engine = server.app.state.octavo.serving.engine

        async def complete(priority: int) -> None:
            response = await server.post(COMPLETIONS, max_tokens=4, priority=priority)
            assert response.status_code == 200, response.text
            ended.append(priority)

        tasks = [asyncio.create_task(complete(0))]
        await asyncio.to_thread(begun.wait, 10)
        tasks += [asyncio.create_task(complete(priority)) for priority in (7, 3, -5)]
        while engine.num_waiting_tokens() < len(tasks):
            await asyncio.sleep(0.005)
        gate.set()
        await asyncio.gather(*tasks)
    assert ended == [0, -5, 3, 7]
