"""Repetition, frequency and presence penalties, in place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.seeded_args import Penalties, TokenCounts
from octavo.kernels.triton.host import ceil_div, check, check_rows_dense, check_same_device

_TILE = 4096


@triton.jit(
    do_not_specialize=["size"],
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "repetition_ptr",
        "frequency_ptr",
        "presence_ptr",
    ],
)
def _penalize_kernel(
    logits_ptr,
    rows_ptr,
    bits_ptr,
    outputs_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    size,
    logits_stride: tl.int64,
    bits_stride: tl.int64,
    outputs_stride: tl.int64,
    TILE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    place = tl.load(rows_ptr + row)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    kept = ids < size
    logits = tl.load(logits_ptr + row * logits_stride + ids, mask=kept)
    words = tl.load(bits_ptr + place * bits_stride + ids // 32, mask=kept, other=0)
    counts = tl.load(outputs_ptr + place * outputs_stride + ids, mask=kept, other=0)
    seen = (((words >> (ids % 32)) & 1) != 0) | (counts > 0)
    # Small penalties must not make infinities, which would count as a failure of the model.
    divided = tl.minimum(tl.div_rn(logits, repetition), LARGEST)
    repeated = tl.where(logits > 0, divided, logits * repetition)
    out = tl.where(seen, repeated, logits)
    out -= frequency * counts.to(tl.float32)
    out -= tl.where(counts > 0, presence, 0.0)
    tl.store(logits_ptr + row * logits_stride + ids, out, mask=kept)


def penalize(logits: Tensor, counts: TokenCounts, penalties: Penalties) -> None:
    """See `octavo.kernels.reference.penalize`."""
    rows, size = logits.shape
    vectors = (penalties.repetition, penalties.frequency, penalties.presence)
    check(logits.dtype == torch.float32, "logits of {}", logits.dtype)
    entries = counts.outputs.shape[0]
    words = (entries, ceil_div(size, 32))
    check(counts.prompt_bits.shape == words, "prompt bits must be {}", words)
    check(counts.outputs.shape[1] == size, "output counts must be of {} ids", size)
    check(
        counts.rows.shape == (rows,) and counts.rows.dtype == torch.int64,
        "rows of the counts must be int64 [{}]",
        rows,
    )
    check(counts.prompt_bits.dtype == torch.int32, "prompt bits must be int32")
    check(counts.outputs.dtype == torch.int16, "output counts must be int16")
    for vector in vectors:
        right = vector.shape == (rows,) and vector.dtype == torch.float32
        check(right, "penalties must be float32 [{}]", rows)
    for name, x in (("logits", logits), ("bits", counts.prompt_bits), ("counts", counts.outputs)):
        check_rows_dense(name, x)
    check_rows_dense("rows of the counts", counts.rows)
    check_same_device(logits, counts.rows, counts.prompt_bits, counts.outputs, *vectors)
    _penalize_kernel[(rows, ceil_div(size, _TILE))](
        logits,
        counts.rows,
        counts.prompt_bits,
        counts.outputs,
        *vectors,
        size,
        logits.stride(0),
        counts.prompt_bits.stride(0),
        counts.outputs.stride(0),
        TILE=_TILE,
        LARGEST=torch.finfo(torch.float32).max,
        num_warps=8,
    )
