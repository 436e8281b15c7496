"""The engine's thread and the event loop take turns."""

import asyncio

from octavo.server.handoff import Handoff


async def test_a_second_step_waits_until_the_first_one_is_sent() -> None:
    handoff = Handoff(asyncio.get_running_loop())
    handoff.give()
    order: list[str] = []

    def second_step() -> None:
        handoff.wait()
        order.append("step")

    waiting = asyncio.create_task(asyncio.to_thread(second_step))
    await asyncio.sleep(0)
    # What becomes ready while earlier outputs are handled is sent within the same turn.
    asyncio.get_running_loop().call_soon(
        lambda: asyncio.get_running_loop().call_soon(order.append, "sent")
    )
    handoff.release()
    await waiting
    assert order == ["sent", "step"]


async def test_an_event_loop_that_is_stuck_does_not_stop_the_engine() -> None:
    handoff = Handoff(asyncio.get_running_loop())
    for _ in range(3):
        handoff.give()
        handoff.wait()
