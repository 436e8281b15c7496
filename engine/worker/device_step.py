"""The part of a step that the device does: from packed words to drawn ids, without the host."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.attention.metadata import AttentionMetadata, ForwardBatch
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import LanguageModel, RunnerLimits
from octavo.engine.worker.packed_step import StepInputs
from octavo.engine.worker.token_counts import DeviceCounts
from octavo.kernels import ops
from octavo.kernels.sampling_args import SamplingFilters
from octavo.kernels.seeded_args import SeededDraws

_SHORT_CONTEXT = 2048
_CONTEXT_GROWTH = 4
_QUERY_LENS = (1, 8, 64)


@dataclass(frozen=True, slots=True)
class Longest:
    """Upper bounds that decide which kernels run, and how many programs of them.

    `decode_tokens` is for the lengths of all sequences with one query token together.
    """

    query_len: int
    seq_len: int
    decode_tokens: int


def context_bounds(max_model_len: int) -> list[int]:
    """Upper bounds on the tokens of a sequence, growing fourfold, the last `max_model_len`."""
    bounds = []
    bound = _SHORT_CONTEXT
    while bound < max_model_len:
        bounds.append(bound)
        bound *= _CONTEXT_GROWTH
    return [*bounds, max_model_len]


class Bounds:
    """Takes the lengths of a step to a few values, so that a few variants of kernels serve all.

    With `fixed` every prompt uses the kernels of the longest one, whatever else is in the step.
    """

    def __init__(self, max_query_len: int, max_model_len: int, fixed: bool = False) -> None:
        between = () if fixed else tuple(n for n in _QUERY_LENS[1:] if n < max_query_len)
        self.query_lens = (1, *between, max_query_len)
        self.seq_lens = context_bounds(max_model_len)

    def of(self, num_tokens: NDArray[np.int64], seq_lens: NDArray[np.int64]) -> Longest:
        """The smallest bounds that hold for a step of `num_tokens` [S] to `seq_lens` [S].

        The warm-up has longer queries than some.
        """
        query_len, seq_len = int(num_tokens.max()), int(seq_lens.max())
        return Longest(
            next((bound for bound in self.query_lens if bound >= query_len), query_len),
            next(bound for bound in self.seq_lens if bound >= seq_len),
            int(seq_lens[num_tokens == 1].sum()),
        )


class DeviceRows:
    """What the device remembers of each row between steps; the last row belongs to padding.

    block_tables  int32 [R + 1, B]   last_tokens  int64 [R + 1]: the last id drawn   counts of ids
    """

    def __init__(
        self, num_rows: int, num_entries: int, vocab_size: int, device: torch.device
    ) -> None:
        self.block_tables = torch.zeros((num_rows + 1, num_entries), dtype=torch.int32).to(device)
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64).to(device)
        self.counts = DeviceCounts(num_rows, vocab_size, device)

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return self.block_tables.nbytes + self.last_tokens.nbytes + self.counts.num_bytes

    def change(self, inputs: StepInputs) -> None:
        """Writes what the step changes in the rows: entries of block tables, counts of tokens."""
        if inputs.places.shape[0]:
            self.block_tables.view(-1).index_copy_(0, inputs.places, inputs.blocks.int())
        if inputs.entered.shape[0]:
            self.counts.enter(inputs.entered, inputs.prompt_bits, inputs.counted, inputs.counts)


class DeviceStep:
    """Forward pass and draws over the rows that the device holds."""

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KVCache,
        rows: DeviceRows,
        limits: RunnerLimits,
    ) -> None:
        self._model = model
        self._kv_caches = kv_cache.layers
        self._rows = rows
        self._block_size = kv_cache.layout.block_size
        self._null_block = kv_cache.layout.num_blocks
        self._window = limits.window
        self._vocab_size = limits.vocab_size

    @property
    def padding_row(self) -> int:
        """The row that padding may write."""
        return self._rows.last_tokens.shape[0] - 1

    def forward(self, inputs: StepInputs, longest: Longest) -> tuple[Tensor, Tensor]:
        """Hidden states [T, hidden] and logits fp32 [L, V], without columns of padding."""
        from_device = self._rows.last_tokens[(-1 - inputs.tokens).clamp(min=0)]
        attention = AttentionMetadata(
            slot_mapping=inputs.slots,
            block_tables=self._tables_of(inputs, -(-longest.seq_len // self._block_size)),
            seq_lens=inputs.seq_lens.int(),
            query_start_loc=inputs.starts.int(),
            max_query_len=longest.query_len,
            max_seq_len=longest.seq_len,
            decode_tokens=longest.decode_tokens,
        )
        batch = ForwardBatch(
            input_ids=torch.where(inputs.tokens < 0, from_device, inputs.tokens),
            positions=inputs.positions,
            logits_indices=inputs.logits_indices,
            attention=attention,
            kv_caches=self._kv_caches,
        )
        hidden = self._model.forward(batch)
        logits = self._model.compute_logits(hidden.index_select(0, inputs.logits_indices))
        return hidden, logits[:, : self._vocab_size]

    def _tables_of(self, inputs: StepInputs, width: int) -> Tensor:
        """The first `width` entries of the block tables: int32 [S, width].

        As in `BatchState.tables_of` the null block stands for blocks that the window has left.
        """
        tables = self._rows.block_tables[:, :width].index_select(0, inputs.rows)
        if self._window is None:
            return tables
        first = inputs.positions[inputs.starts[:-1]]
        num_left = (first - self._window + 1).clamp(min=0) // self._block_size
        places = torch.arange(width, device=tables.device)
        return torch.where(places < num_left[:, None], self._null_block, tables)

    def draw(self, inputs: StepInputs, logits: Tensor) -> Tensor:
        """Draws from `logits` [L, V], which each row remembers: int64 [D].

        Penalties are applied here, to `logits` in place: they need no results on the host.
        """
        rows = inputs.own_rows
        penalties = inputs.penalties.float().view(3, -1)
        self._rows.counts.penalize(logits, rows, penalties)
        temperature = inputs.temperature.float()
        filters = SamplingFilters(temperature, inputs.min_p, inputs.top_k, inputs.top_p)
        cutoff = ops.find_cutoff(logits, inputs.logits_rows, filters)
        draws = SeededDraws(inputs.logits_rows, temperature, inputs.streams)
        # A row of NaN may give anything, which its next step must be able to look up.
        ids = ops.draw_seeded(logits, draws, cutoff).clamp(0, self._vocab_size - 1)
        own = ids[inputs.own_draws]
        self._rows.last_tokens.index_copy_(0, rows, own)
        self._rows.counts.count(rows, own)
        return ids
