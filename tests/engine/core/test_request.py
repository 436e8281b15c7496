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


def test_choices_are_unborn_until_they_have_a_sequence_or_end() -> None:
    request = Request("r", (1,), SamplingParams(max_tokens=1, n=4), seed=0, arrival_time=0.0)
    request.sequences.append(Sequence(0, request, 0, (1,)))
    assert request.unborn_choices == [1, 2, 3]
    request.open_choices.remove(2)
    assert request.unborn_choices == [1, 3]
