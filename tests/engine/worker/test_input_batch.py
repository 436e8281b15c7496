"""Tensors of a step, against values computed by hand."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import Fork, NewSequence, ScheduledSequence
from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.input_batch import draw_batch, forward_batch, step_rows

V = 40


def test_mixed_step_places_every_token(make_driver: Callable[..., object]) -> None:
    driver = make_driver(np.eye(V, dtype=np.float32))
    driver.add(1, [11, 12, 13, 14, 15])
    driver.step(chunk=3)  # block 0
    driver.add(2, [21, 22, 23, 24, 25])
    driver.step(chunk=5)  # 1 goes on with 2 tokens in blocks 0 and 1, 2 takes blocks 2 and 3
    batch = driver.runner._model.batches[-1]
    assert batch.input_ids.tolist() == [14, 15, 21, 22, 23, 24, 25]
    assert batch.positions.tolist() == [3, 4, 0, 1, 2, 3, 4]
    assert batch.attention.slot_mapping.tolist() == [3, 4, 8, 9, 10, 11, 12]
    assert batch.attention.block_tables.tolist() == [[0, 1], [2, 3]]
    assert batch.attention.seq_lens.tolist() == [5, 5]
    assert batch.attention.query_start_loc.tolist() == [0, 2, 7]
    assert (batch.attention.max_query_len, batch.attention.max_seq_len) == (5, 5)
    assert batch.logits_indices.tolist() == [1, 6]


def test_only_sequences_that_reach_their_last_token_draw(
    make_driver: Callable[..., object],
) -> None:
    driver = make_driver(np.eye(V, dtype=np.float32))
    driver.add(1, [1, 2, 3])
    driver.add(2, [4, 5, 6, 7, 8, 9])
    output = driver.step(chunk=4)
    assert output.sampled == {1: (3,)}
    assert driver.runner._model.batches[-1].logits_indices.tolist() == [2]
    assert driver.step(chunk=4).sampled == {1: (3,), 2: (9,)}


def test_a_sequence_without_blocks_for_its_tokens_is_refused(
    make_driver: Callable[..., object],
) -> None:
    driver = make_driver(np.eye(V, dtype=np.float32))
    driver.add(1, [1, 2, 3, 4, 5])
    driver.step()
    driver.sequences[1].block_ids += [99]  # the driver believes that there is one more
    for _ in range(3):
        driver.step()
    with pytest.raises(AssertionError, match="lacks blocks"):
        driver.step()


def test_f10_slots_of_high_blocks_are_not_cut_to_32_bits() -> None:
    state = BatchState(1, 32, 16, V)
    high = 2**31 - 1
    state.add(NewSequence(1, 0, (7,), 1, 0, (high,), SamplingParams(max_tokens=1), 0), None)
    scheduled = (ScheduledSequence(1, 1, 0, (), True),)
    step = step_rows(state, scheduled)
    draws = draw_batch(state, scheduled, step)
    batch = forward_batch(state, step, draws, (), torch.device("cpu"))
    assert batch.attention.slot_mapping.tolist() == [high * 16]


def test_forks_draw_behind_their_parent_from_its_row() -> None:
    state = BatchState(4, 32, 16, V)
    params = SamplingParams(max_tokens=1)
    for seq_id in (1, 2, 3, 4):
        blocks, choice = (seq_id,), seq_id + 10
        state.add(NewSequence(seq_id, choice, (7,) * 3, 3, 0, blocks, params, 0), None)
    scheduled = (
        ScheduledSequence(1, 2, 0, (), False),
        ScheduledSequence(2, 3, 0, (), True, (Fork(5, 1), Fork(6, 2))),
        ScheduledSequence(3, 3, 0, (), True),
        ScheduledSequence(4, 3, 0, (), True),
    )
    draws = draw_batch(state, scheduled, step_rows(state, scheduled), pooled={3})
    assert draws.rows.tolist() == state.rows_of((2, 4)).tolist()
    assert draws.places.tolist() == [1, 3]
    assert draws.seq_ids == (2, 5, 6, 4)
    assert draws.own.tolist() == [0, 3]
    assert draws.logits_rows.tolist() == [0, 0, 0, 1]
    assert draws.choices.tolist() == [12, 1, 2, 14]
