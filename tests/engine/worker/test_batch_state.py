"""Rows of the batch."""

import numpy as np
import pytest

from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import NewSequence
from octavo.engine.worker.batch_state import BatchState


def sequence(seq_id: int, tokens: int, blocks: tuple[int, ...], **params: object) -> NewSequence:
    wanted = SamplingParams(max_tokens=5, **params)  # type: ignore[arg-type]
    return NewSequence(seq_id, 0, tuple(range(1, tokens + 1)), tokens, 0, blocks, wanted, 7)


def test_a_freed_row_is_taken_again_without_old_blocks() -> None:
    state = BatchState(1, 32, 4, 100)
    state.add(sequence(1, 10, (5, 6, 7)), None)
    state.remove(1)
    state.add(sequence(2, 3, (9,)), None)
    (row,) = state.rows_of([2])
    assert state.block_tables[row].tolist() == [9, 0, 0, 0, 0, 0, 0, 0]
    assert len(state) == 1


def test_block_tables_grow_and_take_a_replaced_block() -> None:
    state = BatchState(1, 32, 4, 100)
    state.add(sequence(1, 6, (5, 6)), None)
    state.set_blocks(0, 2, (8, 3))
    state.set_blocks(0, 1, (4,))
    assert state.block_tables[0, :5].tolist() == [5, 4, 8, 3, 0]
    assert state.num_blocks[0] == 4
    with pytest.raises(AssertionError, match="gap"):
        state.set_blocks(0, 6, (1,))


def test_sampled_ids_extend_the_history() -> None:
    state = BatchState(2, 32, 4, 100)
    state.add(sequence(1, 2, (0,)), None)
    state.add(sequence(2, 3, (1,)), None)
    rows = state.rows_of([2, 1])
    state.append(rows, np.array([50, 60]))
    prompt, output = state.prompt_and_output(int(rows[0]))
    assert (prompt.tolist(), output.tolist()) == ([1, 2, 3], [50])
    assert state.num_output_tokens(rows).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("params", "filtered"),
    [
        ({}, False),
        ({"top_k": -1}, False),
        ({"top_k": 100}, False),
        ({"top_k": 99}, True),
        ({"top_p": 0.99}, True),
        ({"min_p": 0.1}, True),
    ],
)
def test_filters_that_cannot_narrow_are_off(params: dict[str, float], filtered: bool) -> None:
    state = BatchState(1, 32, 4, 100)
    state.add(sequence(1, 2, (0,), **params), None)
    assert state.filtered[0] == filtered
