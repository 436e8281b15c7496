"""From the plan of a step to the tensors of a forward pass, in a few array operations."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.engine.core.scheduler_output import ScheduledSequence
from octavo.engine.worker.batch_state import BatchState


@dataclass(frozen=True, slots=True)
class StepRows:
    """Which rows a step computes; S sequences.

    rows         int64 [S]      rows of the batch state
    first        int64 [S]      position of the first token computed
    num_tokens   int64 [S]      tokens computed
    start        int64 [S + 1]  place of each sequence's first token within the step, then T
    """

    rows: NDArray[np.int64]
    first: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    start: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DrawBatch:
    """The draws of a step: D of them, from L rows of logits. A fork draws from its parent's row.

    rows         int64 [L]    row of the batch state behind each row of logits
    places       int64 [L]    its place among the scheduled sequences
    own          int64 [L]    the draw of the sequence itself; the others from its row are forks'
    seq_ids      D ids        who gets each draw
    logits_rows  int64 [D]    the row of logits of each draw
    choices      int64 [D]    the choice that each draw is for, which names its random stream
    """

    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    own: NDArray[np.int64]
    seq_ids: tuple[int, ...]
    logits_rows: NDArray[np.int64]
    choices: NDArray[np.int64]


def step_rows(state: BatchState, scheduled: Sequence[ScheduledSequence]) -> StepRows:
    """The rows of a step; checks that the plan fits what the rows hold."""
    rows = state.rows_of([item.seq_id for item in scheduled])
    num_tokens = np.array([item.num_tokens for item in scheduled], np.int64)
    first = state.num_computed[rows]
    end = first + num_tokens
    start = np.zeros(rows.size + 1, np.int64)
    np.cumsum(num_tokens, out=start[1:])
    assert (num_tokens > 0).all(), "a scheduled sequence computes nothing"
    assert (end <= state.num_blocks[rows] * state.block_size).all(), "a sequence lacks blocks"
    sample = np.array([item.sample for item in scheduled], np.bool_)
    assert ((end == state.num_tokens[rows]) >= sample).all(), "a draw before the last token"
    assert (end <= state.num_tokens[rows]).all(), "more tokens scheduled than are known"
    return StepRows(rows, first, num_tokens, start)


def draw_batch(
    state: BatchState,
    scheduled: Sequence[ScheduledSequence],
    step: StepRows,
    pooled: Container[int] = (),
) -> DrawBatch:
    """The draws of a step, in order of the scheduled sequences, forks behind their parent.

    Sequences whose ids are in `pooled` end with an embedding and draw nothing.
    """
    places = [
        place for place, item in enumerate(scheduled) if item.sample and item.seq_id not in pooled
    ]
    seq_ids: list[int] = []
    forks: dict[int, int] = {}  # the choice of each, by its draw
    for place in places:
        item = scheduled[place]
        seq_ids.append(item.seq_id)
        for fork in item.forks:
            forks[len(seq_ids)] = fork.index
            seq_ids.append(fork.seq_id)
    is_own = np.ones(len(seq_ids), np.bool_)
    is_own[list(forks)] = False
    logits_rows = is_own.cumsum() - 1
    rows = step.rows[places]
    choices = state.choices[rows][logits_rows]
    choices[list(forks)] = list(forks.values())
    return DrawBatch(
        rows,
        np.array(places, np.int64),
        np.flatnonzero(is_own),
        tuple(seq_ids),
        logits_rows,
        choices,
    )


def forward_batch(
    state: BatchState,
    step: StepRows,
    draws: DrawBatch,
    kv_caches: tuple[LayerKVCache, ...],
    device: torch.device,
) -> ForwardBatch:
    """The device tensors of a step."""
    block_size = state.block_size
    num_tokens, start = step.num_tokens, step.start
    token_rows = np.repeat(step.rows, num_tokens)
    positions = np.arange(start[-1]) + np.repeat(step.first - start[:-1], num_tokens)
    blocks = state.block_tables[token_rows, positions // block_size].astype(np.int64)
    seq_lens = step.first + num_tokens
    max_seq_len = int(seq_lens.max())
    num_blocks = -(-max_seq_len // block_size)

    def to_device(array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        # Even an operation that does nothing would give the GIL away.
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    attention = AttentionMetadata(
        slot_mapping=to_device(blocks * block_size + positions % block_size),
        block_tables=to_device(state.tables_of(step.rows, step.first, num_blocks)),
        seq_lens=to_device(seq_lens.astype(np.int32)),
        query_start_loc=to_device(start.astype(np.int32)),
        max_query_len=int(num_tokens.max()),
        max_seq_len=max_seq_len,
    )
    return ForwardBatch(
        input_ids=to_device(state.token_ids[token_rows, positions].astype(np.int64)),
        positions=to_device(positions),
        logits_indices=to_device(start[1:][draws.places] - 1),
        attention=attention,
        kv_caches=kv_caches,
    )
