"""A model's forward pass as a list of instructions that a back end runs in one call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from octavo.kernels.attention_args import PagedBatch


class NoLoweringError(Exception):
    """The back end has no instruction for this; the layers have to be run one by one."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of a layer: Hq, Hkv and D."""

    q_heads: int
    kv_heads: int
    size: int


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What attention of a layer has beside the heads.

    index   of the layer's cache
    norms   (query weight, key weight, eps) of the norm before the rotation, or None
    """

    index: int
    scale: float
    window: int | None = None
    norms: tuple[Tensor, Tensor, float] | None = None


class KeyValueCache(Protocol):
    """The cache of a layer: two tensors [blocks, Hkv, block_size, D]."""

    @property
    def key(self) -> Tensor: ...
    @property
    def value(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What differs from one run to the next.

    input_ids      int64 [T]
    cos_sin        float32 [P, R], see `ops.rotary_embedding`
    rotary_rows    int64 [T]      the row of `cos_sin` for each token
    slot_mapping   int64 [T]
    batch                         the sequences of the step
    caches                        of each layer
    """

    input_ids: Tensor
    cos_sin: Tensor
    rotary_rows: Tensor
    slot_mapping: Tensor
    batch: PagedBatch
    caches: Sequence[KeyValueCache]


class StepProgram(Protocol):
    """First told all instructions in order, each named like the op it stands for, then run.

    Operands are kept: what an instruction writes is opaque here, called `Any`, and handed to
    those that read it. Results are bit for bit those of the ops. Instructions raise
    NoLoweringError for what they cannot do.
    """

    def embedding(self, table: Tensor) -> Any:  # noqa: ANN401
        """The rows of the step's ids: the first residual."""

    def rms_norm(self, residual: Any, weight: Tensor, eps: float) -> Any:  # noqa: ANN401
        """The residual, normed: an input of linear layers."""

    def add_rms_norm(self, x: Any, residual: Any, weight: Tensor, eps: float) -> Any:  # noqa: ANN401
        """As `rms_norm`, after `x` was added to the residual in place."""

    def linear(self, x: Any, packed: Any) -> Any:  # noqa: ANN401
        """`packed` is what the same back end made of a weight."""

    def gated_linear(self, x: Any, packed: Any, activation: str) -> Any:  # noqa: ANN401
        """act(gate) * up of the product; activations "silu", "gelu" and "gelu_tanh"."""

    def attention(self, qkv: Any, heads: HeadShape, layer: LayerAttention) -> Any:  # noqa: ANN401
        """Norms and rotates heads, stores keys and values, attends; an input of linear layers."""

    def output_norm(self, x: Any, residual: Any, weight: Tensor, eps: float) -> None:  # noqa: ANN401
        """As `add_rms_norm`; the result is what `run` returns. The last instruction."""

    def takes(self, cache: Tensor) -> bool:
        """Whether `run` can work on such a key/value cache [blocks, Hkv, block_size, D]."""

    def run(self, step: StepTensors) -> Tensor:
        """Runs all instructions: [T, hidden] in the model's dtype.

        Raises IndexError where an id, a position, a slot or a block is out of range.
        """
