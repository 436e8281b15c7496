"""The normalizer of log-softmax, in one pass and without a copy of the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.host import check, check_rows_dense

_TILE = 4096


@triton.jit(do_not_specialize=["size"])
def _log_sum_exp_kernel(logits_ptr, out_ptr, size, logits_stride: tl.int64, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    peak = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, size, TILE):
        kept = start + columns < size
        place = logits_ptr + row * logits_stride + start + columns
        logits = tl.load(place, mask=kept, other=float("-inf"))
        new_peak = tl.maximum(peak, logits)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - shift) + tl.exp(logits - shift)
        peak = new_peak
    top = tl.max(peak, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(out_ptr + row, shift + tl.log(tl.sum(total * tl.exp(peak - shift), 0)))


def log_sum_exp(logits: Tensor) -> Tensor:
    """See `octavo.kernels.reference.log_sum_exp`."""
    check(logits.dim() == 2 and logits.dtype == torch.float32, "{} {}", logits.shape, logits.dtype)
    check_rows_dense("logits", logits)
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _log_sum_exp_kernel[(rows,)](logits, out, size, logits.stride(0), TILE=_TILE, num_warps=8)
    return out
