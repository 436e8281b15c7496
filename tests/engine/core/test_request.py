"""The table of moves of a sequence."""

import pytest

from octavo.engine.core.request import FinishReason, Request, Sequence
from octavo.engine.core.sampling_params import SamplingParams


def sequence() -> Sequence:
    request = Request("r", (1, 2), SamplingParams(max_tokens=2), seed=0, arrival_time=0.0)
    request.sequences.append(Sequence(0, request, 0, (1, 2)))
    return request.sequences[0]


def test_preemption_keeps_tokens_and_gives_up_what_was_computed() -> None:
    item = sequence()
    item.run()
    item.advance(2)
    item.append_tokens([3])
    item.preempt()
    assert (list(item.token_ids), item.num_computed_tokens, item.num_output_tokens) == (
        [1, 2, 3],
        0,
        1,
    )


def test_nothing_follows_the_end() -> None:
    item = sequence()
    item.finish(FinishReason.ABORT)
    for move in (item.run, item.preempt, lambda: item.finish(FinishReason.STOP)):
        with pytest.raises(AssertionError):
            move()


def test_more_tokens_than_known_cannot_be_computed() -> None:
    with pytest.raises(AssertionError):
        sequence().advance(3)


def test_a_request_ends_with_the_last_choice_that_will_exist() -> None:
    request = Request("r", (1,), SamplingParams(max_tokens=1, n=2), seed=0, arrival_time=0.0)
    for index in range(2):
        item = Sequence(index, request, index, (1,))
        request.sequences.append(item)
        item.finish(FinishReason.STOP)
        assert request.finished == (index == 1)
