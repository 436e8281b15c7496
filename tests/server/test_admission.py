"""Places for accepted requests."""

import pytest

from octavo.engine.core.errors import InvalidRequestError, KeyLimitError, QueueFullError
from octavo.server.admission import Admission, DrainRate
from octavo.server.context import RequestContext, enter_request
from octavo.server.key_limits import KeyLimits


def make(capacity: int = 3, max_tokens: int | None = None, queued: int = 0) -> Admission:
    return Admission(capacity, max_tokens, lambda: queued)


def test_g09_a_full_queue_refuses_and_a_free_place_is_taken_again() -> None:
    admission = make(capacity=1)
    ticket = admission.admit()

    with pytest.raises(QueueFullError) as caught:
        admission.admit()
    ticket.release()
    admission.admit()

    assert caught.value.retry_after >= 1


def test_a_ticket_gives_its_places_back_once() -> None:
    admission = make()
    with admission.admit() as ticket:
        ticket.resize(3)
        assert admission.num_accepted == 3
        ticket.release()

    assert admission.num_accepted == 0


def test_a_batch_is_taken_as_a_whole_or_not_at_all() -> None:
    admission = make(capacity=3)
    other = admission.admit()
    ticket = admission.admit()

    with pytest.raises(QueueFullError):
        ticket.resize(3)

    assert admission.num_accepted == 2
    other.release()
    ticket.resize(3)
    assert admission.num_accepted == 3


def test_a_batch_above_the_total_is_the_clients_fault() -> None:
    with pytest.raises(InvalidRequestError, match="4 prompts") as caught, make().admit() as ticket:
        ticket.resize(4)

    assert caught.value.param == "prompt"


@pytest.mark.parametrize(("queued", "fits"), [(9, True), (10, False)])
def test_waiting_prompt_tokens_are_bounded(queued: int, fits: bool) -> None:
    admission = make(max_tokens=10, queued=queued)

    if fits:
        admission.admit()
    else:
        with pytest.raises(QueueFullError, match="prompt tokens"):
            admission.admit()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_retry_after_follows_the_rate_at_which_requests_end() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    for _ in range(20):
        clock.now += 0.5
        rate.record(1)

    # Two end in a second: each further refused client is sent half a second behind the last.
    assert [rate.retry_after(1) for _ in range(6)] == [1, 1, 2, 2, 3, 3]
    clock.now += 3
    assert rate.retry_after(1) == 1


def test_retry_after_stays_within_a_minute_and_is_never_0() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    clock.now += 1000

    assert [rate.retry_after(1), rate.retry_after(10), rate.retry_after(10)] == [30, 60, 60]
    clock.now += 60
    rate.record(5000)
    assert rate.retry_after(1) == 1


def test_a_key_may_have_so_many_unfinished_requests() -> None:
    limits = KeyLimits(2, None, Clock())
    limits.take("alice", 2)
    limits.check("bob", 2)

    with pytest.raises(KeyLimitError, match="2 unfinished requests of at most 2"):
        limits.check("alice", 1)
    limits.give("alice", 1)
    limits.check("alice", 1)


def test_a_key_may_send_so_many_requests_within_any_minute() -> None:
    clock = Clock()
    limits = KeyLimits(None, 3, clock)
    for _ in range(3):
        limits.take("alice", 1)
        clock.now += 10

    with pytest.raises(KeyLimitError) as caught:
        limits.check("alice", 1)
    assert caught.value.retry_after == 30
    with pytest.raises(KeyLimitError) as caught:
        limits.check("alice", 2)
    assert caught.value.retry_after == 40
    clock.now += 30
    limits.check("alice", 1)


def test_more_than_a_minute_allows_is_refused_without_a_history() -> None:
    with pytest.raises(KeyLimitError):
        KeyLimits(None, 3, Clock()).check("alice", 4)


def test_a_refused_request_takes_nothing_from_its_key() -> None:
    limits = KeyLimits(5, None, Clock())
    admission = Admission(1, None, lambda: 0, limits)
    enter_request(RequestContext(key_name="alice"))

    with admission.admit(), pytest.raises(QueueFullError):
        admission.admit()
    limits.check("alice", 5)
    enter_request(RequestContext())
