"""The functions that every back end offers; `octavo.kernels.ops` documents each of them."""

from typing import Any, Protocol

from torch import Tensor

from octavo.kernels.attention_args import StepBatch
from octavo.kernels.cache_args import PagedCache
from octavo.kernels.rotary_args import HeadNorm, Rotation
from octavo.kernels.sampling_args import SamplingFilters
from octavo.kernels.seeded_args import Cutoff, Penalties, SeededDraws, TokenCounts


class Kernels(Protocol):
    """A module with these functions is a back end; `packed` is opaque to all but its maker."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any: ...  # noqa: ANN401

    def linear(self, x: Tensor, packed: Any) -> Tensor: ...  # noqa: ANN401

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def rotary_embedding(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def write_kv_cache(
        self, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None: ...

    def paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: StepBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor: ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu_and_mul(self, gate_up: Tensor, tanh: bool) -> Tensor: ...

    def copy_blocks(
        self, key_cache: Tensor, value_cache: Tensor, src: Tensor, dst: Tensor
    ) -> None: ...


class SamplingKernels(Protocol):
    """A back end for draws on the host."""

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...

    def draw(
        self, logits: Tensor, rows: Tensor, temperature: Tensor, uniforms: Tensor
    ) -> Tensor: ...

    def draw_filtered(
        self, logits: Tensor, rows: Tensor, filters: SamplingFilters, uniforms: Tensor
    ) -> Tensor: ...


class DeviceKernels(Kernels, Protocol):
    """A back end that has, beside these, what only pays on a GPU."""

    def linear_in_slices(self, x: Tensor, packed: Any) -> Tensor: ...  # noqa: ANN401

    def rotate_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        cache: PagedCache,
        slot_mapping: Tensor,
    ) -> Tensor: ...

    def scaled_paged_attention(
        self,
        q: Tensor,
        cache: PagedCache,
        batch: StepBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor: ...

    def swap_blocks(
        self, source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor
    ) -> None: ...

    def penalize(self, logits: Tensor, counts: TokenCounts, penalties: Penalties) -> None: ...

    def find_cutoff(self, logits: Tensor, rows: Tensor, filters: SamplingFilters) -> Cutoff: ...

    def draw_seeded(self, logits: Tensor, draws: SeededDraws, cutoff: Cutoff | None) -> Tensor: ...

    def log_sum_exp(self, logits: Tensor) -> Tensor: ...
