"""Order of sequences, and how often the head may be passed."""

from octavo.engine.core.request import Request, Sequence
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.scheduler.queue import (
    MAX_PASSES,
    Order,
    OrderedSequences,
    WaitingQueue,
    fcfs_order,
    priority_order,
)


def sequence(seq_id: int, priority: int = 0) -> Sequence:
    request = Request(
        f"r{seq_id}",
        (1,),
        SamplingParams(max_tokens=1),
        seed=0,
        arrival_time=0.0,
        priority=priority,
        number=seq_id,
    )
    return Sequence(seq_id, request, 0, (1,))


def order_of(order: Order, *sequences: Sequence) -> list[int]:
    ordered = OrderedSequences(order)
    for item in sequences:
        ordered.add(item)
    ordered.check_integrity()
    return [item.seq_id for item in ordered.snapshot()]


def test_fcfs_keeps_arrival_and_knows_no_priority() -> None:
    assert order_of(fcfs_order, sequence(2, priority=-5), sequence(0), sequence(1)) == [0, 1, 2]


def test_lower_priority_number_goes_first_then_arrival() -> None:
    sequences = (sequence(0, 1), sequence(1, 0), sequence(2, -1), sequence(3, 0))
    assert order_of(priority_order, *sequences) == [2, 1, 3, 0]


def test_choices_stand_beside_their_request_whenever_they_were_made() -> None:
    first, second = sequence(0), sequence(1)
    child = Sequence(7, first.request, 1, (1,))
    assert order_of(fcfs_order, second, child, first) == [0, 7, 1]


def test_f15_one_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    queue = WaitingQueue(fcfs_order)
    head = sequence(0)
    queue.add(head)
    for _ in range(MAX_PASSES):
        assert queue.may_be_passed(head)
        queue.record_pass(head)
    assert not queue.may_be_passed(head)
    queue.remove(head)
    queue.add(head)
    assert queue.may_be_passed(head)
