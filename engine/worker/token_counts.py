"""Which ids each sequence has seen, kept on the device for the penalties.

The host says it once, when a sequence enters; from then on the device counts what it draws. So
penalties wait for no results.

Recorded steps count in fixed memory, and what is not taken before the cache is sized may be missing
later. So each row has its counts from the start, as part of the memory that is planned for rows. 16
bits keep that near a third of a percent of a GPU: 0.3 GB at 1,024 rows and 152k ids.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.row_updates import TableChange
from octavo.kernels import ops
from octavo.kernels.seeded_args import Penalties, TokenCounts

_BITS = 64
# Of one id in one sequence; from there on it counts as so often.
_MOST = torch.iinfo(torch.int16).max


class Entering(NamedTuple):
    """Rows whose sequences enter with penalties; all int64.

    rows             [E]
    prompt_bits      [E * W]  bit i of word w of a row stands for id 64 * w + i
    counted, counts  [G]      row * vocab_size + id of each id generated so far, and how often
    """

    rows: NDArray[np.int64]
    prompt_bits: NDArray[np.int64]
    counted: NDArray[np.int64]
    counts: NDArray[np.int64]

    @staticmethod
    def of(state: BatchState, changes: Sequence[TableChange]) -> "Entering":
        """Those among the rows that changed; their ids must all be known."""
        rows = [
            change.row for change in changes if change.enters and state.is_penalized(change.row)
        ]
        if not rows:
            return _NOBODY
        bits, counted, counts = [], [], []
        for row in rows:
            prompt, output = state.prompt_and_output(row)
            bits.append(_bits(prompt, state.vocab_size))
            ids, numbers = np.unique(output, return_counts=True)
            counted.append(row * state.vocab_size + ids.astype(np.int64))
            counts.append(numbers.clip(max=_MOST))
        joined = (np.concatenate(parts) for parts in (bits, counted, counts))
        return Entering(np.array(rows, np.int64), *joined)


_NOBODY = Entering(*(np.zeros(0, np.int64) for _ in Entering._fields))


def _bits(ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.int64]:
    seen = np.zeros(-(-vocab_size // _BITS) * _BITS, np.bool_)
    seen[ids] = True
    return np.packbits(seen, bitorder="little").view("<i8").astype(np.int64, copy=False)


class DeviceCounts:
    """The counts of R rows and of one for padding; a row without penalties holds anything.

    prompt_bits int32 [R + 1, 2 W]   outputs int16 [R + 1, V]: no more than the largest int16
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        num_words = 2 * -(-vocab_size // _BITS)
        self._vocab_size = vocab_size
        shape = (num_rows + 1, num_words)
        self.prompt_bits = torch.zeros(shape, dtype=torch.int32, device=device)
        shape = (num_rows + 1, vocab_size)
        self.outputs = torch.zeros(shape, dtype=torch.int16, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return self.prompt_bits.nbytes + self.outputs.nbytes

    def enter(self, rows: Tensor, prompt_bits: Tensor, counted: Tensor, counts: Tensor) -> None:
        """Replaces what is known of `rows`; arguments as the fields of `Entering`."""
        bits = prompt_bits.view(torch.int32).view(rows.shape[0], -1)
        self.prompt_bits.index_copy_(0, rows, bits)
        self.outputs.index_fill_(0, rows, 0)
        self.outputs.view(-1).index_copy_(0, counted, counts.short())

    def penalize(self, logits: Tensor, rows: Tensor, penalties: Tensor) -> None:
        """Changes `logits` [L, V] in place by `penalties` float32 [3, L] of `rows` int64 [L]."""
        num_words = -(-self._vocab_size // 32)
        counts = TokenCounts(rows, self.prompt_bits[:, :num_words], self.outputs)
        ops.penalize(logits, counts, Penalties(*penalties.unbind()))

    def count(self, rows: Tensor, ids: Tensor) -> None:
        """One more of `ids` int64 [L] in `rows` int64 [L]; only that of padding occurs twice."""
        places = rows * self._vocab_size + ids
        counts = self.outputs.view(-1)
        counts.index_copy_(0, places, counts[places].clamp(max=_MOST - 1) + 1)
