"""What the worker remembers of the sequences between steps: one row of arrays for each."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.attention.metadata import KVCacheLayout
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import NewSequence
from octavo.engine.worker.adjustments import LogitAdjustments
from octavo.engine.worker.language_model import RunnerLimits

# Below it a temperature would divide fp32 logits into infinities and NaN; it acts as this.
_LOWEST_TEMPERATURE = 1e-6
_NO_PENALTIES = np.array([[1.0], [0.0], [0.0]])


class BatchState:
    """Host arrays with a fixed row per sequence, from its entry into the batch to its removal.

    R rows, B entries per block table. A row is meaningless while no sequence holds it.

    token_ids        int32 [R, max_model_len + 1]  known ids; negative while a running step
                     draws an id
    num_tokens       int64 [R]     known tokens          num_prompt_tokens  int64 [R]
    num_computed     int64 [R]     tokens whose K and V are in the cache
    block_tables     int32 [R, B]  zero past num_blocks  num_blocks         int64 [R]
    temperature      float32 [R]   min_p, top_p float64 [R]   top_k int64 [R], 0 is off
    greedy           bool [R]      filtered bool [R]: min_p, top_k or top_p narrow the draw
    penalties        float64 [3, R]  repetition, frequency, presence; off for beams
    seeds, choices   int64 [R]     name the random stream
    num_candidates   int64 [R]     continuations wanted for a beam; 0 for what is no beam
    logprobs, prompt_logprobs  int64 [R]  alternatives wanted per token; -1 for nothing
    plain            bool [R]      the best token is all that is wanted of the logits
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        window: int | None = None,
        null_block: int = 0,
    ) -> None:
        """`window` is the longest sliding window of a model all of whose layers have one.

        `null_block` is a block outside the pool, for the places of those that it has left.
        """
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._window = window
        self._null_block = null_block
        self._rows: dict[int, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        # Zeroed memory is taken from the system page by page, when it is first written.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.greedy = np.zeros(max_num_seqs, np.bool_)
        self.filtered = np.zeros(max_num_seqs, np.bool_)
        self.penalties = np.tile(_NO_PENALTIES, max_num_seqs)
        self.seeds = np.zeros(max_num_seqs, np.int64)
        self.choices = np.zeros(max_num_seqs, np.int64)
        self.num_candidates = np.zeros(max_num_seqs, np.int64)
        self.logprobs = np.full(max_num_seqs, -1, np.int64)
        self.prompt_logprobs = np.full(max_num_seqs, -1, np.int64)
        self.plain = np.zeros(max_num_seqs, np.bool_)
        self.adjustments: list[LogitAdjustments | None] = [None] * max_num_seqs

    @classmethod
    def of(cls, limits: RunnerLimits, layout: KVCacheLayout) -> "BatchState":
        """Rows for sequences within `limits`, over a cache of `layout`."""
        return cls(
            limits.max_num_seqs,
            limits.max_model_len,
            layout.block_size,
            limits.vocab_size,
            limits.window,
            null_block=layout.num_blocks,
        )

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return self.num_tokens.size

    def __len__(self) -> int:
        """Sequences that hold a row."""
        return len(self._rows)

    def rows_of(self, seq_ids: Sequence[int]) -> NDArray[np.int64]:
        """Rows of sequences that are in the batch."""
        rows = self._rows
        return np.array([rows[seq_id] for seq_id in seq_ids], np.int64)

    def add(
        self,
        sequence: NewSequence,
        adjustments: LogitAdjustments | None,
        num_candidates: int = 0,
    ) -> int:
        """Gives `sequence` a row, which is returned."""
        assert sequence.seq_id not in self._rows, sequence.seq_id
        row = self._free.pop()
        self._rows[sequence.seq_id] = row
        count = len(sequence.token_ids)
        assert sequence.num_computed_tokens < count
        self.token_ids[row, :count] = sequence.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = sequence.num_prompt_tokens
        self.num_computed[row] = sequence.num_computed_tokens
        self.block_tables[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = 0
        self.set_blocks(row, 0, sequence.block_ids)
        self.seeds[row] = sequence.seed
        self.choices[row] = sequence.index
        self._set_params(row, sequence.params)
        self.num_candidates[row] = num_candidates
        self.adjustments[row] = adjustments
        self.plain[row] = self.greedy[row] and adjustments is None and self.logprobs[row] < 0
        return row

    def remove(self, seq_id: int) -> None:
        """Frees the row of `seq_id`."""
        row = self._rows.pop(seq_id)
        self.adjustments[row] = None
        self._free.append(row)

    def set_blocks(self, row: int, offset: int, block_ids: Sequence[int]) -> None:
        """Writes `block_ids` into the block table from entry `offset` on."""
        end = offset + len(block_ids)
        assert offset <= self.num_blocks[row], "the block table would have a gap"
        self.block_tables[row, offset:end] = block_ids
        self.num_blocks[row] = max(self.num_blocks[row], end)

    def tables_of(
        self, rows: NDArray[np.int64], first: NDArray[np.int64], width: int
    ) -> NDArray[np.int32]:
        """The first `width` entries of the block tables of `rows`: int32 [S, width].

        Blocks that no token from position `first` int64 [S] on can see may hold another sequence
        by now; the null block stands in their places, since a kernel may read whole tiles.
        """
        tables = np.ascontiguousarray(self.block_tables[rows, :width])
        if self._window is not None:
            num_left = np.maximum(first - self._window + 1, 0) // self.block_size
            tables[np.arange(width) < num_left[:, None]] = self._null_block
        return tables

    def append(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Adds one sampled id to each of `rows`."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def settle(
        self,
        seq_ids: Sequence[int],
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        token_ids: NDArray[np.int64],
    ) -> None:
        """Writes ids that were unknown when they were appended, where the sequences still are."""
        current = self._rows
        alive = [
            current.get(seq_id) == row for seq_id, row in zip(seq_ids, rows.tolist(), strict=True)
        ]
        self.token_ids[rows[alive], places[alive]] = token_ids[alive]

    def is_penalized(self, row: int) -> bool:
        """Whether the sequence in `row` has a penalty."""
        return bool((self.penalties[:, row : row + 1] != _NO_PENALTIES).any())

    def num_output_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Generated tokens of each of `rows`."""
        return self.num_tokens[rows] - self.num_prompt_tokens[rows]

    def prompt_and_output(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The ids of the prompt and those generated so far; views."""
        prompt, known = self.num_prompt_tokens[row], self.num_tokens[row]
        return self.token_ids[row, :prompt], self.token_ids[row, prompt:known]

    def _set_params(self, row: int, params: SamplingParams) -> None:
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.temperature[row] = max(params.temperature, _LOWEST_TEMPERATURE)
        self.min_p[row] = params.min_p
        self.top_k[row] = top_k
        self.top_p[row] = params.top_p
        self.greedy[row] = params.greedy or params.use_beam_search
        self.filtered[row] = top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        if params.use_beam_search:
            self.penalties[:, row : row + 1] = _NO_PENALTIES
        else:
            self.penalties[0, row] = params.repetition_penalty
            self.penalties[1, row] = params.frequency_penalty
            self.penalties[2, row] = params.presence_penalty
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
