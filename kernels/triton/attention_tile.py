"""One step of attention: a tile of cached tokens added to an online softmax.

M query rows   N tokens of the tile   D head size, padded to a power of two
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) = exp2(x * LOG2_E), and the hardware has exp2."""

MIN_DOT = 16
"""Rows and inner size of the smallest tensor-core product."""


@triton.jit
def attend_tile(
    acc,
    peak,
    total,
    q,
    first_seen,
    end_seen,
    key_ptr,
    value_ptr,
    table_ptr,
    start,
    end,
    block_stride,
    row_stride,
    score_scale,
    soft_cap,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds cached tokens start .. start + TILE - 1 to the state (acc, peak, total); returns it.

    acc [M, D], peak [M], total [M], all fp32, hold for each query row the weighted sum of values,
    the largest score so far, and the sum of weights 2^(score - peak). q [M, D].
    key_ptr, value_ptr point to the cache of the KV head, table_ptr to the sequence's block ids.
    A row sees tokens first_seen[m] .. end_seen[m] - 1, and no token at `end` or later is read.
    Without MASKED every row sees the whole tile, and nothing is compared.
    score_scale holds log2(e), except with SOFT_CAP, where it is applied after the cap.
    """
    columns = tl.arange(0, q.shape[1])
    positions = start + tl.arange(0, TILE)
    if MASKED:
        written = positions < end
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=written, other=0)
        kept = written[:, None] & (columns < HEAD_DIM)[None, :]
    else:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
        kept = (columns < HEAD_DIM)[None, :]
    rows = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * row_stride
    offsets = rows[:, None] + columns[None, :]
    # Rows that were never written may hold NaN, and 0 * NaN is NaN: they are not read at all.
    if MASKED or q.shape[1] != HEAD_DIM:
        keys = tl.load(key_ptr + offsets, mask=kept, other=0.0)
        values = tl.load(value_ptr + offsets, mask=kept, other=0.0)
    else:
        keys = tl.load(key_ptr + offsets)
        values = tl.load(value_ptr + offsets)

    scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee") * score_scale
    if SOFT_CAP:
        # tanh through one exponential, which may overflow to infinity without harm.
        fraction = 2.0 / (1.0 + tl.exp2(scores * (-2.0 * LOG2_E / soft_cap))) - 1.0
        scores = fraction * (soft_cap * LOG2_E)
    if MASKED:
        seen = positions[None, :] >= first_seen[:, None]
        seen &= positions[None, :] < end_seen[:, None]
        scores = tl.where(seen, scores, float("-inf"))

    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shift = new_peak
    if MASKED:
        # A row that has seen nothing keeps peak -inf; -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(q.dtype), values.to(q.dtype), acc, input_precision="ieee")
    return acc, new_peak, total
