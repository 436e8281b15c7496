"""The engine thread: one callback per step, and one terminal delta per choice whatever happens."""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
from engine_harness import Harness, Sizes
from simulated_model import solo_text

from octavo.engine.core.block_map import BlockMap, BlockOwner
from octavo.engine.core.errors import ContextLengthError, EngineDeadError, InvalidRequestError
from octavo.engine.core.messages import (
    AbortRequest,
    AddRequest,
    ResetPrefixCache,
    TakeBlockMap,
)
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.request_output import EngineStats, SequenceDelta
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.engine_loop import EngineLoop, Heartbeat

# Long enough never to matter on a busy machine; nothing waits for it when all is well.
PATIENCE = 60.0
PROMPT = tuple(range(10))


def request(name: str, **options: object) -> AddRequest:
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 5, **options})
    return AddRequest(name, PROMPT, params, 0.0)


class Receiver:
    """What the event loop's side would see."""

    def __init__(self) -> None:
        self.harness = Harness(Sizes(num_blocks=256))
        self.loop = EngineLoop(self.harness.engine, self.on_step, self.on_fatal)
        self.deltas: dict[tuple[str, int], list[SequenceDelta]] = defaultdict(list)
        self.stats: list[EngineStats] = []
        self.fatal: list[str] = []
        self.during_step: Callable[[list[SequenceDelta]], None] = lambda deltas: None
        self.changed = threading.Condition()

    def on_step(self, deltas: list[SequenceDelta], stats: EngineStats) -> None:
        with self.changed:
            for delta in deltas:
                self.deltas[delta.request_id, delta.index].append(delta)
            self.stats.append(stats)
            self.changed.notify_all()
        self.during_step(deltas)

    def on_fatal(self, reason: str) -> None:
        with self.changed:
            self.fatal.append(reason)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE)

    def reasons(self, name: str, index: int = 0) -> list[str]:
        found = [delta.finish_reason for delta in self.deltas[name, index]]
        assert None not in found[-1:]
        return [reason for reason in found if reason is not None]

    def ended(self, name: str, index: int = 0) -> bool:
        deltas = self.deltas[name, index]
        return bool(deltas) and deltas[-1].finish_reason is not None

    def error(self, name: str, index: int = 0) -> str | None:
        return self.deltas[name, index][-1].error


class Gate:
    """Holds each step of an executor until it is let through."""

    def __init__(self, receiver: Receiver) -> None:
        self.reached = threading.Semaphore(0)
        self.passed = threading.Semaphore(0)
        self._execute = receiver.harness.executor.execute_model
        receiver.harness.executor.execute_model = self  # type: ignore[method-assign, assignment]

    def __call__(self, plan: SchedulerOutput) -> ModelOutput:
        self.reached.release()
        assert self.passed.acquire(timeout=PATIENCE)
        return self._execute(plan)

    def await_step(self) -> None:
        assert self.reached.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self.passed.release(10_000)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    assert receiver.loop.shutdown(PATIENCE)


def test_requests_posted_before_and_after_the_start_are_answered(receiver: Receiver) -> None:
    receiver.loop.post(request("a"))
    receiver.loop.start()
    receiver.wait(lambda: receiver.ended("a"))
    receiver.loop.post(request("b", n=2))
    receiver.wait(lambda: receiver.ended("b", 0) and receiver.ended("b", 1))
    expected = solo_text(PROMPT, request("a").params)
    assert [token for delta in receiver.deltas["b", 1] for token in delta.token_ids] == expected
    assert receiver.reasons("a") == ["length"]


def test_each_step_is_one_callback(receiver: Receiver) -> None:
    for name in "abc":
        receiver.loop.post(request(name))
    receiver.loop.start()
    receiver.wait(lambda: all(receiver.ended(name) for name in "abc"))
    # The prompts are equal, so the second and third start a step later and share the first's block.
    assert [stats.num_steps for stats in receiver.stats] == [1, 2, 3, 4, 5, 6]


def test_a_refused_request_gets_one_error_per_choice_and_harms_nobody(receiver: Receiver) -> None:
    receiver.loop.start()
    receiver.loop.post(request("too long", n=2, max_tokens=10_000))
    receiver.loop.post(request("good"))
    receiver.wait(lambda: receiver.ended("good") and receiver.ended("too long", 1))
    for index in range(2):
        assert receiver.reasons("too long", index) == ["error"]
        assert "context" in str(receiver.error("too long", index))
        assert isinstance(receiver.deltas["too long", index][-1].refusal, ContextLengthError)
    assert receiver.reasons("good") == ["length"]


def test_an_open_id_is_refused_at_once(receiver: Receiver) -> None:
    receiver.loop.post(request("a"))
    with pytest.raises(InvalidRequestError):
        receiver.loop.post(request("a"))
    receiver.loop.start()
    receiver.wait(lambda: receiver.ended("a"))
    receiver.loop.post(request("a"))


def test_f07_abort_of_unknown_twice_and_finished(receiver: Receiver) -> None:
    gate = Gate(receiver)
    receiver.loop.start()
    receiver.loop.post(AbortRequest("unknown"))
    receiver.loop.post(request("a", max_tokens=500))
    gate.await_step()
    receiver.loop.post(AbortRequest("a"))
    receiver.loop.post(AbortRequest("a"))
    gate.open()
    receiver.wait(lambda: receiver.ended("a"))
    receiver.loop.post(AbortRequest("a"))
    receiver.loop.post(request("b"))
    receiver.wait(lambda: receiver.ended("b"))
    assert receiver.reasons("a") == ["abort"]
    receiver.harness.engine.check_integrity()


def test_f07_abort_from_within_the_callback_and_from_another_thread_during_it(
    receiver: Receiver,
) -> None:
    def abort(deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is None and delta.request_id == "here":
                receiver.loop.post(AbortRequest("here"))
            elif delta.finish_reason is None:
                other = threading.Thread(target=receiver.loop.post, args=[AbortRequest("there")])
                other.start()
                other.join(PATIENCE)
                assert not other.is_alive()

    receiver.during_step = abort
    receiver.loop.post(request("here", max_tokens=500))
    receiver.loop.post(request("there", max_tokens=500))
    receiver.loop.start()
    receiver.wait(lambda: receiver.ended("here") and receiver.ended("there"))
    assert receiver.reasons("here") == receiver.reasons("there") == ["abort"]
    assert receiver.stats[-1].num_used_blocks == 0


def test_f08_an_exception_in_a_step_ends_all_requests_once_and_for_good(
    receiver: Receiver,
) -> None:
    gate = Gate(receiver)
    receiver.loop.start()
    receiver.loop.post(request("running", n=2, max_tokens=100))
    gate.await_step()
    receiver.harness.executor.error = RuntimeError("device lost")
    receiver.loop.post(request("in the inbox"))
    gate.open()
    receiver.wait(lambda: bool(receiver.fatal))
    assert receiver.fatal == ["RuntimeError: device lost"]
    assert receiver.loop.fatal_error == "RuntimeError: device lost"
    for name, index in (("running", 0), ("running", 1), ("in the inbox", 0)):
        assert receiver.reasons(name, index) == ["error"]
    assert not receiver.loop.alive
    with pytest.raises(EngineDeadError, match="device lost"):
        receiver.loop.post(request("late"))
    receiver.loop.post(AbortRequest("running"))
    assert receiver.loop.shutdown(PATIENCE)
    assert receiver.harness.executor.is_shut_down
    assert receiver.stats[-1].num_running == 0


def test_f08_finished_requests_are_not_ended_again_by_a_dying_engine(receiver: Receiver) -> None:
    receiver.loop.start()
    receiver.loop.post(request("done"))
    receiver.wait(lambda: receiver.ended("done"))
    receiver.harness.executor.error = RuntimeError("device lost")
    receiver.loop.post(request("open"))
    receiver.wait(lambda: bool(receiver.fatal))
    assert receiver.reasons("done") == ["length"]
    assert receiver.reasons("open") == ["error"]


def test_f08_a_step_that_never_ends_can_be_declared_dead(receiver: Receiver) -> None:
    gate = Gate(receiver)
    receiver.loop.start()
    receiver.loop.post(request("a"))
    gate.await_step()
    assert receiver.loop.heartbeat.started > receiver.loop.heartbeat.ended
    receiver.loop.fail("a step takes too long")
    receiver.loop.fail("again")
    assert receiver.fatal == ["a step takes too long"]
    assert receiver.reasons("a") == ["error"]
    gate.open()
    assert receiver.loop.shutdown(PATIENCE)
    assert receiver.reasons("a") == ["error"]


def test_heartbeat_tells_the_age_of_the_running_step_only() -> None:
    assert Heartbeat().step_age(100.0) == 0.0
    assert Heartbeat(started=40.0, ended=30.0).step_age(100.0) == 60.0
    assert Heartbeat(started=40.0, ended=41.0).step_age(100.0) == 0.0


def test_shutdown_ends_open_requests_with_an_error_and_releases_the_executor(
    receiver: Receiver,
) -> None:
    gate = Gate(receiver)
    receiver.loop.start()
    receiver.loop.post(request("a", max_tokens=500))
    gate.await_step()
    assert not receiver.loop.shutdown(timeout=0)
    gate.open()
    assert receiver.loop.shutdown(PATIENCE)
    assert receiver.reasons("a") == ["error"]
    assert receiver.harness.executor.is_shut_down
    assert receiver.loop.fatal_error is None
    assert receiver.fatal == []
    with pytest.raises(EngineDeadError):
        receiver.loop.post(request("late"))


def test_shutdown_without_a_start_releases_the_executor_and_answers(receiver: Receiver) -> None:
    receiver.loop.post(request("a"))
    assert receiver.loop.shutdown(PATIENCE)
    assert receiver.reasons("a") == ["error"]
    assert receiver.harness.executor.is_shut_down


def test_a_receiver_that_fails_is_fatal_too(receiver: Receiver) -> None:
    def fail(deltas: list[SequenceDelta]) -> None:
        raise RuntimeError("no event loop")

    receiver.during_step = fail
    receiver.loop.start()
    receiver.loop.post(request("a", max_tokens=100))
    receiver.wait(lambda: bool(receiver.fatal))
    assert receiver.fatal == ["RuntimeError: no event loop"]


def test_prefix_cache_can_be_reset_by_message(receiver: Receiver) -> None:
    receiver.loop.start()
    for name in "abc":
        receiver.loop.post(request(name))
        receiver.wait(lambda name=name: receiver.ended(name))  # type: ignore[misc]
        if name == "b":
            receiver.loop.post(ResetPrefixCache())
    cached = [receiver.deltas[name, 0][0].num_cached_tokens for name in "abc"]
    assert cached == [0, 8, 0]


def test_a_picture_of_the_blocks_is_taken_between_steps(receiver: Receiver) -> None:
    maps: list[BlockMap] = []
    receiver.loop.post(request("a"))
    receiver.loop.post(TakeBlockMap(maps.append))
    receiver.loop.start()
    receiver.wait(lambda: bool(maps) and receiver.ended("a"))
    receiver.loop.post(TakeBlockMap(maps.append))
    receiver.wait(lambda: len(maps) == 2)
    owners = [{block.owner for block in found.blocks} for found in maps]
    assert owners == [{BlockOwner.FREE}, {BlockOwner.FREE, BlockOwner.CACHED}]


def test_the_bookkeeping_is_verified_once_the_engine_is_idle(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.engine_loop.IDLE_CHECK_S", 0.01)
    receiver.harness.engine._kv_cache._pool.allocate(1)
    receiver.loop.start()
    receiver.wait(lambda: any(stats.num_integrity_errors == 1 for stats in receiver.stats))
    receiver.loop.post(request("a"))
    receiver.wait(lambda: receiver.ended("a"))
    assert receiver.reasons("a") == ["length"]


class _Work:
    """Idle work that is never done."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def __call__(self) -> bool:
        self.begun.set()
        return True


def test_requests_and_the_end_come_before_idle_work_is_done() -> None:
    receiver = Receiver()
    work = _Work()
    held = weakref.ref(work)
    loop = EngineLoop(receiver.harness.engine, receiver.on_step, receiver.on_fatal, work)
    loop.start()
    assert work.begun.wait(PATIENCE)
    loop.post(request("a"))
    receiver.wait(lambda: receiver.ended("a"))
    assert loop.shutdown(PATIENCE)
    del work
    # It would keep the cache.
    assert held() is None


def test_idle_work_is_done_once_no_request_is_open() -> None:
    receiver = Receiver()
    open_requests: list[bool] = []
    idle = threading.Event()

    def work() -> bool:
        open_requests.append(receiver.harness.engine.has_work())
        if len(open_requests) == 3:
            idle.set()
        return not idle.is_set()

    loop = EngineLoop(receiver.harness.engine, receiver.on_step, receiver.on_fatal, work)
    loop.post(request("a"))
    loop.start()
    receiver.wait(lambda: receiver.ended("a"))
    assert idle.wait(PATIENCE)
    assert loop.shutdown(PATIENCE)
    assert open_requests == [False] * 3
