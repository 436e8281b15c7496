"""The only door to the kernels.

Every function picks a back end by device, dtype and shape, and all back ends give the same values
up to rounding. Shapes use these letters:

T tokens of a step   S sequences   Hq query heads   Hkv key/value heads (Hq is a multiple of it)
D head size          N, K output and input features of a linear layer
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.attention_args import StepBatch
from octavo.kernels.backend import DeviceKernels, Kernels, SamplingKernels
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.reference import projection, sampling
from octavo.kernels.reference.projection import PlainWeight
from octavo.kernels.rotary_args import HeadNorm, Rotation
from octavo.kernels.sampling_args import SamplingFilters, ScoredTokens
from octavo.kernels.seeded_args import Cutoff, Penalties, SeededDraws, TokenCounts
from octavo.kernels.step_program import NoLoweringError, StepProgram

try:
    from octavo.kernels import cpu
except Exception as error:  # Numba or llvmlite is missing or broken, in whatever way
    logging.getLogger(__name__).warning(
        "The CPU kernels need numba, which cannot be imported (%s: %s): plain torch is used, which "
        "is slower. Reinstalling it may help: pip install --force-reinstall numba",
        type(error).__name__,
        error,
    )
    from octavo.kernels import no_cpu as cpu  # type: ignore[no-redef]

_gpu: DeviceKernels = reference
_watch: Callable[[Callable[[str], None] | None], None] | None = None
_gpu_reads_fp8: Callable[[torch.device], bool] | None = None
if torch.cuda.is_available():
    # Elsewhere Triton would only cost the time to import it.
    from octavo.kernels import triton

    triton.use_writable_cache()
    triton.sum_in_fp32()
    _gpu = triton
    _watch = triton.watch_compilations
    _gpu_reads_fp8 = triton.reads_fp8

_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


@contextmanager
def reference_only() -> Iterator[None]:
    """Within it, and in this thread only, every op runs (and packs) with the reference back end."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


_fixed_shapes: ContextVar[bool] = ContextVar("fixed_shapes", default=False)


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Linear layers packed within it give each row the same bits whatever the other rows are.

    On a GPU by products of a fixed number of rows; the CPU's kernels do so anyhow.
    """
    token = _fixed_shapes.set(True)
    try:
        yield
    finally:
        _fixed_shapes.reset(token)


INT8_WEIGHT_BYTES = 1 + 2 / 32
"""Bytes of a weight of `int8_weights`, with its part of the scale."""

_int8_weights: ContextVar[bool] = ContextVar("int8_weights", default=False)


@contextmanager
def int8_weights() -> Iterator[None]:
    """Linear layers packed within it keep their weights as int8, where `can_quantize`.

    32 inputs of an output share a scale, their largest magnitude / 127 rounded to bfloat16; other
    packing raises ValueError. Activations are whole numbers of 16 bits with such scales.
    """
    token = _int8_weights.set(True)
    try:
        yield
    finally:
        _int8_weights.reset(token)


def can_quantize(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `int8_weights` is possible for models of `dtype` on `device`."""
    return device.type == "cpu" and not _reference_only.get() and cpu.can_quantize(dtype)


def reads_fp8(device: torch.device) -> bool:
    """Whether there are kernels for an e4m3 cache on `device`."""
    return device.type == "cuda" and _gpu_reads_fp8 is not None and _gpu_reads_fp8(device)


def watch_compilations(tell: Callable[[str], None] | None) -> None:
    """Calls `tell` with the name of each GPU kernel compiled from now on; None ends that."""
    if _watch is not None:
        _watch(tell)


def _backend(x: Tensor) -> Kernels:
    """The back end for tensors like `x`; the one place where it is chosen."""
    if _reference_only.get():
        return reference
    if x.is_cuda:
        return _gpu
    return cpu if x.is_cpu and cpu.usable(x.dtype) else reference


def _draws(logits: Tensor) -> SamplingKernels:
    """The back end for draws from `logits`."""
    rows_are_dense = logits.stride(1) == 1 and logits.dtype == torch.float32
    if rows_are_dense and logits.is_cpu and not _reference_only.get() and cpu.can_sample():
        return cpu
    return sampling


def _device_backend(x: Tensor) -> DeviceKernels:
    """As `_backend`, for ops that have no kernel of their own on CPU."""
    return _gpu if x.is_cuda and not _reference_only.get() else reference


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The weight (and bias) of a linear layer, laid out as one back end wants it.

    `shape` is (N, K) and `dtype` the precision of the weight that was packed. `in_slices` is the
    back end for products of a fixed shape, where they are wanted.
    """

    kernels: Kernels
    packed: Any
    shape: tuple[int, int]
    dtype: torch.dtype
    in_slices: DeviceKernels | None = None


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Prepares `weight` [N, K] and `bias` [N] for `linear`; once, at load.

    The result may share memory with `weight`, so the caller must not write to it afterwards.
    """
    kernels = _backend(weight)
    rows, columns = weight.shape
    if _int8_weights.get():
        if not can_quantize(weight.dtype, weight.device):
            raise ValueError(f"no int8 weights for {weight.dtype} on {weight.device}")
        packed = cpu.pack_int8_linear(weight, bias)
        return LinearWeight(cpu, packed, (rows, columns), weight.dtype)
    sliced = _device_backend(weight) if _fixed_shapes.get() and kernels is not cpu else None
    packed = kernels.pack_linear(weight, bias)
    return LinearWeight(kernels, packed, (rows, columns), weight.dtype, sliced)


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """x [T, K] times the transposed weight, plus bias: [T, N] in the dtype of `x`.

    Sums are kept in fp32 and rounded once.
    """
    if weight.in_slices is not None:
        return weight.in_slices.linear_in_slices(x, weight.packed)
    return weight.kernels.linear(x, weight.packed)


def output_bounds(weight: LinearWeight, factors: Tensor) -> Tensor:
    """What each output of `linear` stays within, either way: fp32 [N].

    For inputs `factors` [K] * u with |u|_2 <= sqrt(K), as a norm of that weight leaves them.
    Raises ValueError for weights in a form of the CPU's kernels.
    """
    if not isinstance(weight.packed, PlainWeight):
        raise ValueError("no bounds of weights that are packed for the CPU")
    return projection.output_bounds(weight.packed, factors)


def logits(x: Tensor, weight: LinearWeight) -> Tensor:
    """As `linear`, rounded to the dtype of `x`, but given in fp32: [T, N]."""
    if weight.kernels is cpu and weight.in_slices is None:
        return cpu.linear(x, weight.packed, wide=True)
    return linear(x, weight).float()


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows `ids` [T] of `weight` [V, K]: [T, K]."""
    return _backend(weight).embedding(ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of `x`, any leading shape.

    Llama's rounding: the quotient is formed in fp32, rounded to the dtype of `x`, then multiplied.
    """
    return _backend(x).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual, rounded once to their dtype; all [T, K]."""
    return _backend(x).add_rms_norm(x, residual, weight, eps)


def rotary_embedding(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotates q [T, Hq, D] and k [T, Hkv, D] by row `positions` [T] of the table `cos_sin`.

    `cos_sin` is fp32 [P, R]: R / 2 cosines, then R / 2 sines, for the first R <= D components of
    each head; the others pass through. Component i is paired with i + R / 2 (NeoX halves). The
    rotation runs in fp32 and is rounded once.
    """
    return _backend(q).rotary_embedding(q, k, positions, cos_sin)


def write_kv_cache(
    k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Stores k and v [T, Hkv, D] in the caches [blocks, Hkv, block_size, D], in place.

    `slot_mapping` int64 [T] is block id * block_size + row; a negative slot skips its token.
    """
    _backend(k).write_kv_cache(k, v, key_cache, value_cache, slot_mapping)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: StepBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over the cached keys and values: [T, Hq, D].

    The last query token of a sequence is its token seq_len - 1. With `window` w a token sees
    itself and the w - 1 tokens before it. Scores are q.k * scale, bounded by
    soft_cap * tanh(score / soft_cap) where given; softmax and sums in fp32. Cache rows that were
    never written may hold anything, NaN included. A sequence with seq_len 0 gives zeros.
    """
    return _backend(q).paged_attention(q, key_cache, value_cache, batch, scale, window, soft_cap)


def rotate_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: HeadNorm | None,
    rotation: Rotation,
    cache: PagedCache,
    slot_mapping: Tensor,
) -> Tensor:
    """Norms and rotates the heads, stores keys and values, returns q [T, Hq, D].

    q [T, Hq, D], k and v [T, Hkv, D]. The same as `rms_norm` of each head, `rotary_embedding` and
    `write_kv_cache` in this order; one launch on a GPU. A cache with scales holds k and v divided
    by them, and what e4m3 cannot hold becomes its largest number.
    """
    kernels = _backend(q)
    if cache.key.dtype != k.dtype or kernels is not cpu:
        return _device_backend(q).rotate_and_cache(q, k, v, norm, rotation, cache, slot_mapping)
    if norm is not None:
        q = kernels.rms_norm(q, norm.q_weight, norm.eps)
        k = kernels.rms_norm(k, norm.k_weight, norm.eps)
    q, k = kernels.rotary_embedding(q, k, rotation.positions, rotation.cos_sin)
    kernels.write_kv_cache(k, v, cache.key, cache.value, slot_mapping)
    return q


def scaled_paged_attention(
    q: Tensor,
    cache: PagedCache,
    batch: StepBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """As `paged_attention`, over a cache that may be e4m3 with scales."""
    if cache.key.dtype == q.dtype and cache.key_scale is None and cache.value_scale is None:
        return paged_attention(q, cache.key, cache.value, batch, scale, window, soft_cap)
    return _device_backend(q).scaled_paged_attention(q, cache, batch, scale, window, soft_cap)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2 * N], the gate in the first half: [T, N]."""
    return _backend(gate_up).silu_and_mul(gate_up)


def gelu_and_mul(gate_up: Tensor, tanh: bool) -> Tensor:
    """gelu(gate) * up as `silu_and_mul`; `tanh` picks the tanh approximation of gelu."""
    return _backend(gate_up).gelu_and_mul(gate_up, tanh)


def copy_blocks(key_cache: Tensor, value_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copies blocks `src` [n] to blocks `dst` [n] (int64 ids) in both caches, in place.

    All reads come before all writes; `dst` holds no id twice.
    """
    _backend(key_cache).copy_blocks(key_cache, value_cache, src, dst)


def swap_blocks(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copies blocks `source_ids` [n] of one cache to blocks `target_ids` [n] of another, in place.

    Caches are [blocks, ...] with contiguous blocks of one shape and dtype; one of them may be in
    pinned host memory. Ids are int64, on the GPU where there is one; `target_ids` holds none twice.
    """
    _device_backend(source_ids).swap_blocks(source, target, source_ids, target_ids)


# Whole forward passes.


def new_step_program(dtype: torch.dtype, device: torch.device) -> StepProgram:
    """An empty program for a model of `dtype` on `device`.

    Raises NoLoweringError where the kernels chosen there cannot run programs.
    """
    if _backend(torch.empty(0, dtype=dtype, device=device)) is cpu:
        return cpu.Program(dtype)
    name = str(dtype).removeprefix("torch.")
    raise NoLoweringError(f"the kernels for {name} on {device}")


def set_cpu_threads(dtype: torch.dtype, num_threads: int | None) -> None:
    """Threads for models of `dtype` on CPU; None: as many as help at the time.

    The kernels have threads of their own, beside which torch's would only compete for the cores;
    where plain torch does the work the number is torch's.
    """
    if cpu.usable(dtype):
        torch.set_num_threads(1)
        if num_threads is not None:
            cpu.shared_pool().resize(num_threads)
    elif num_threads is not None:
        torch.set_num_threads(num_threads)


# Sampling. R rows of logits, V ids, N draws.


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The highest of each row of `logits` [R, V] and its id, the lowest one on a tie: two [R].

    A row that holds NaN gives NaN.
    """
    return _draws(logits).argmax(logits)


def draw(logits: Tensor, rows: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    """Draws ids from softmax(logits / temperature): int64 [N].

    `logits` fp32 [R, V], `rows` int64 [N] (a row may occur often), `temperature` fp32 [N],
    `uniforms` float64 [N] in [0, 1): the inverse CDF, in order of ids, is taken there. Rows must
    have a finite maximum. A token of probability 0 is never drawn.
    """
    return _draws(logits).draw(logits, rows, temperature, uniforms)


def draw_filtered(
    logits: Tensor, rows: Tensor, filters: SamplingFilters, uniforms: Tensor
) -> Tensor:
    """As `draw`, after temperature, min_p, top_k and top_p in this order: int64 [N].

    Each filter works on what the one before left, renormalized. The inverse CDF runs from the best
    token down, the lower id first on a tie.
    """
    return _draws(logits).draw_filtered(logits, rows, filters, uniforms)


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredTokens:
    """Log-softmax of `token_ids` [N] under `logits` fp32 [N, V], with the `num_top` best ids."""
    return sampling.score_tokens(logits, token_ids, num_top)


# Sampling without leaving the device: nothing waits for results, and shapes are fixed.


def penalize(logits: Tensor, counts: TokenCounts, penalties: Penalties) -> None:
    """Applies `penalties` to `logits` fp32 [R, V] in place: repetition, frequency, presence."""
    _device_backend(logits).penalize(logits, counts, penalties)


def find_cutoff(logits: Tensor, rows: Tensor, filters: SamplingFilters) -> Cutoff:
    """The tokens of `logits` fp32 [R, V] that min_p, then top_k, then top_p leave of each row.

    `rows` int64 [N] and `filters` as in `draw_filtered`, whose rules hold.
    """
    return _device_backend(logits).find_cutoff(logits, rows, filters)


def draw_seeded(logits: Tensor, draws: SeededDraws, cutoff: Cutoff | None) -> Tensor:
    """One id per draw from the surviving tokens of its row: int64 [N].

    Gumbel-max over `logits` fp32 [R, V] with noise that depends on a draw's stream and the token
    only. Temperature 0 takes the best token, the lowest id on a tie.
    """
    return _device_backend(logits).draw_seeded(logits, draws, cutoff)


def score_on_device(logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredTokens:
    """As `score_tokens`, without a wait for the device."""
    total = _device_backend(logits).log_sum_exp(logits)
    return sampling.score_with_total(logits, total, token_ids, num_top)
