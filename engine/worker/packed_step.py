"""All that the device has to be told for a step, as one array of 64-bit words.

S sequences with T tokens   L rows of logits   D draws   C changed entries of block tables
E rows whose sequence enters with penalties   G ids that these have generated, each once
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, float64

from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.input_batch import DrawBatch, StepRows
from octavo.engine.worker.random_streams import streams
from octavo.engine.worker.row_updates import TableChange
from octavo.engine.worker.token_counts import Entering


class StepShape(NamedTuple):
    """Sizes of a step; `scored` counts the draws whose log-probability is wanted.

    `entered` is E, `prompt_words` that of all their prompts, `generated` is G.
    """

    tokens: int
    sequences: int
    logits: int
    draws: int
    scored: int = 0
    changes: int = 0
    entered: int = 0
    prompt_words: int = 0
    generated: int = 0

    @staticmethod
    def decode(size: int) -> "StepShape":
        """One token, one row of logits and one draw for each of `size` sequences."""
        return StepShape(size, size, size, size)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The sections of the array, in order; views on the host and on the device.

    tokens          [T]      ids; -1 - row for the last id that the device drew for a row
    positions       [T]      slots [T]: addresses in the cache; -1 for padding
    rows            [S]      rows of the batch state; padding has one of its own
    seq_lens        [S]      starts [S + 1]
    logits_indices  [L]      tokens whose logits are wanted
    own_rows        [L]      row that remembers the draw `own_draws` [L]
    logits_rows     [D]      row of logits of each draw
    temperature     [D]      0 is greedy; min_p, top_k, top_p [D]
    streams         [D]      64 random bits each
    penalties       [3 L]    repetition, frequency, presence
    scored          [N]      draws whose log-probability is wanted
    places, blocks  [C]      entries of the block tables, flattened, and what is written there
    entered         [E]      rows to forget the tokens of; then a bit per id for those of the prompt
    prompt_bits     [E * W]
    counted, counts [G]      entries of the output counts, flattened, and what is written there

    Temperature, min_p, top_p and penalties are float64, all others int64.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    seq_lens: Tensor
    starts: Tensor
    logits_indices: Tensor
    own_rows: Tensor
    own_draws: Tensor
    logits_rows: Tensor
    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    streams: Tensor
    penalties: Tensor
    scored: Tensor
    places: Tensor
    blocks: Tensor
    entered: Tensor
    prompt_bits: Tensor
    counted: Tensor
    counts: Tensor

    @staticmethod
    def of(words: Tensor, shape: StepShape) -> "StepInputs":
        """Views of a packed step in `words` int64, on any device."""
        return StepInputs(
            *(
                words[part].view(float64) if name in _FLOATS else words[part]
                for name, part in sections(shape).items()
            )
        )


_FLOATS = ("temperature", "min_p", "top_p", "penalties")


# Where the fields of `Entering` go.
_ENTERING = ("entered", "prompt_bits", "counted", "counts")


@lru_cache(maxsize=1024)
def sections(shape: StepShape) -> dict[str, slice]:
    """Where each field of `StepInputs` lies."""
    tokens, sequences, logits, draws = shape[:4]
    sizes = (
        [tokens] * 3
        + [sequences, sequences, sequences + 1]
        + [logits] * 3
        + [draws] * 6
        + [3 * logits, shape.scored, shape.changes, shape.changes]
        + [shape.entered, shape.prompt_words, shape.generated, shape.generated]
    )
    ends = np.cumsum(sizes).tolist()
    return {
        field.name: slice(end - size, end)
        for field, size, end in zip(fields(StepInputs), sizes, ends, strict=True)
    }


def num_words(shape: StepShape) -> int:
    """Length of the array."""
    return int(sections(shape)["counts"].stop)


def padding(size: int, padding_row: int) -> NDArray[np.int64]:
    """The words of a step of `size` decodes that all are padding."""
    shape = StepShape.decode(size)
    words = np.zeros(num_words(shape), np.int64)
    _pad({name: words[part] for name, part in sections(shape).items()}, 0, padding_row)
    return words


def _pad(parts: dict[str, NDArray[np.int64]], count: int, padding_row: int) -> None:
    """Rows from `count` on: they write nowhere, see nothing and draw the best of anything."""
    size = parts["rows"].size
    parts["slots"][count:] = -1
    parts["rows"][count:] = padding_row
    parts["starts"][count:] = np.arange(count, size + 1)
    for name in ("logits_indices", "own_draws", "logits_rows"):
        parts[name][count:] = np.arange(count, size)
    parts["own_rows"][count:] = padding_row
    parts["top_p"][count:].view(np.float64)[:] = 1.0
    # Repetition alone is off at 1.
    parts["penalties"].view(np.float64).reshape(3, size)[0, count:] = 1.0


class StepPacker:
    """Packs steps of one batch state."""

    def __init__(self, state: BatchState) -> None:
        self._state = state

    def pack(
        self,
        step: StepRows,
        draws: DrawBatch,
        scored: NDArray[np.int64],
        changes: list[TableChange],
        size: int | None,
    ) -> tuple[StepShape, NDArray[np.int64]]:
        """The shape and the words of a step; `size` pads a step of plain decodes to so many."""
        num_changes = sum(len(change.block_ids) for change in changes)
        num_draws = draws.logits_rows.size
        if size is None:
            num_tokens, num_rows = int(step.start[-1]), step.rows.size
            shape = StepShape(num_tokens, num_rows, draws.rows.size, num_draws)
        else:
            shape = StepShape.decode(size)
        entering = Entering.of(self._state, changes)
        shape = shape._replace(
            scored=scored.size,
            changes=num_changes,
            entered=entering.rows.size,
            prompt_words=entering.prompt_bits.size,
            generated=entering.counted.size,
        )
        words = np.zeros(num_words(shape), np.int64)
        parts = {name: words[part] for name, part in sections(shape).items()}
        if size is not None:
            _pad(parts, step.rows.size, self._state.num_rows)
        self._pack_tokens(parts, step)
        self._pack_draws(parts, step, draws)
        parts["scored"][:] = scored
        self._pack_changes(parts, changes)
        for name, array in zip(_ENTERING, entering, strict=True):
            parts[name][:] = array
        return shape, words

    def _pack_tokens(self, parts: dict[str, NDArray[np.int64]], step: StepRows) -> None:
        state, start = self._state, step.start
        count, num_rows = int(start[-1]), step.rows.size
        token_rows = np.repeat(step.rows, step.num_tokens)
        positions = np.arange(count) + np.repeat(step.first - start[:-1], step.num_tokens)
        blocks = state.block_tables[token_rows, positions // state.block_size].astype(np.int64)
        tokens = state.token_ids[token_rows, positions].astype(np.int64)
        parts["tokens"][:count] = np.where(tokens < 0, -1 - token_rows, tokens)
        parts["positions"][:count] = positions
        parts["slots"][:count] = blocks * state.block_size + positions % state.block_size
        parts["rows"][:num_rows] = step.rows
        parts["seq_lens"][:num_rows] = step.first + step.num_tokens
        parts["starts"][: num_rows + 1] = start

    def _pack_draws(
        self, parts: dict[str, NDArray[np.int64]], step: StepRows, draws: DrawBatch
    ) -> None:
        state, num_logits, count = self._state, draws.rows.size, draws.logits_rows.size
        parts["logits_indices"][:num_logits] = step.start[1:][draws.places] - 1
        parts["own_rows"][:num_logits] = draws.rows
        parts["own_draws"][:num_logits] = draws.own
        parts["logits_rows"][:count] = draws.logits_rows
        rows = draws.rows[draws.logits_rows]
        temperature = np.where(state.greedy[rows], 0.0, state.temperature[rows])
        parts["temperature"][:count].view(np.float64)[:] = temperature
        parts["min_p"][:count].view(np.float64)[:] = state.min_p[rows]
        parts["top_k"][:count] = state.top_k[rows]
        parts["top_p"][:count].view(np.float64)[:] = state.top_p[rows]
        penalties = parts["penalties"].view(np.float64).reshape(3, -1)
        penalties[:, :num_logits] = state.penalties[:, draws.rows]
        parts["streams"][:count] = streams(
            state.seeds[rows], draws.choices, state.num_output_tokens(rows)
        )

    def _pack_changes(
        self, parts: dict[str, NDArray[np.int64]], changes: list[TableChange]
    ) -> None:
        width = self._state.block_tables.shape[1]
        end = 0
        for row, offset, block_ids, _ in changes:
            start, end = end, end + len(block_ids)
            first = row * width + offset
            parts["places"][start:end] = np.arange(first, first + len(block_ids))
            parts["blocks"][start:end] = block_ids
