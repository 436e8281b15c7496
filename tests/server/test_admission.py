"""Places for accepted requests."""

import pytest

from octavo.engine.core.errors import InvalidRequestError, QueueFullError
from octavo.server.admission import Admission


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
