"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share.

They differ in biases, query/key norms, windows and rope scaling, all of which `ModelConfig` states.
An architecture that differs in more gets a file of its own beside this one.

T tokens of a step   Hq, Hkv query and key/value heads   D head size
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.config.model import ModelConfig
from octavo.engine.attention.metadata import (
    AttentionMetadata,
    CacheScales,
    ForwardBatch,
    LayerKVCache,
)
from octavo.engine.attention.paged import PagedAttention
from octavo.engine.attention.scales import e4m3_scales
from octavo.engine.layers.embedding import Embedding
from octavo.engine.layers.linear import Linear, WeightSlot
from octavo.engine.layers.mlp import GatedMLP
from octavo.engine.layers.norm import RMSNorm
from octavo.engine.layers.rotary import RotaryEmbedding
from octavo.engine.models.weights import dummy_weights, load_weights
from octavo.kernels import ops
from octavo.kernels.rotary_args import HeadNorm, Rotation
from octavo.kernels.step_program import (
    HeadShape,
    LayerAttention,
    NoLoweringError,
    StepProgram,
    StepTensors,
)

logger = logging.getLogger(__name__)


class SelfAttention:
    """Projections, rotation and attention of one layer."""

    def __init__(self, config: ModelConfig, window: int | None, dtype: torch.dtype) -> None:
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
            dtype,
            bias=config.qkv_bias,
        )
        self.out = Linear(
            query_size, {"o_proj": config.hidden_size}, dtype, bias=config.attention_out_bias
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.attention = PagedAttention(config.head_dim, window)

    def __call__(
        self,
        x: Tensor,
        rotation: Rotation,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        first_key = self.num_heads
        first_value = first_key + self.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads[:, :first_key], heads[:, first_key:first_value], heads[:, first_value:]
        norm = None
        if self.q_norm is not None and self.k_norm is not None:
            norm = HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        attended = self.attention((q, k, v), norm, rotation, cache, metadata)
        return self.out(attended.flatten(1))

    def cache_scales(self, factors: Tensor, gain: float) -> CacheScales:
        """Scales under which no key or value can leave the range of e4m3.

        `factors` [hidden_size] are the weight of the norm before; the rotation lengthens by `gain`.
        """
        bounds = ops.output_bounds(self.qkv.loaded(), factors).view(-1, self.head_dim)
        first_value = self.num_heads + self.num_kv_heads
        keys, values = bounds[self.num_heads : first_value], bounds[first_value:]
        if self.k_norm is not None:
            # A normed head has no component above sqrt(D).
            keys = (self.k_norm.weight.float().abs() * self.head_dim**0.5).expand_as(keys)
        # A rotated component is at most sqrt(2) times the larger one of its pair.
        return e4m3_scales(keys * (gain * 2**0.5)), e4m3_scales(values)

    def lower(self, program: StepProgram, x: Any, index: int) -> Any:  # noqa: ANN401
        """The layer as instructions; `index` is that of its cache."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        attended = program.attention(
            self.qkv.lower(program, x),
            HeadShape(self.num_heads, self.num_kv_heads, self.head_dim),
            LayerAttention(index, self.attention.scale, self.attention.window, norms),
        )
        return self.out.lower(program, attended)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, WeightSlot]]:
        """The checkpoint names below `prefix` with their places."""
        yield from self.qkv.weight_slots(prefix)
        yield from self.out.weight_slots(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{prefix}q_norm.weight", WeightSlot(self.q_norm.weight)
            yield f"{prefix}k_norm.weight", WeightSlot(self.k_norm.weight)


class DecoderLayer:
    """Attention and MLP, each normed before and added to the residual after."""

    def __init__(self, config: ModelConfig, window: int | None, dtype: torch.dtype) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = SelfAttention(config, window, dtype)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config, dtype)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """(output, residual), [T, hidden_size] each; the next norm adds the two.

        The first layer gets the embeddings as `x` and no residual.
        """
        x, residual = self.input_norm.add_and_norm(x, residual)
        x = self.self_attn(x, rotation, cache, metadata)
        x, residual = self.post_attention_norm.add_and_norm(x, residual)
        return self.mlp(x), residual

    def lower(self, program: StepProgram, x: Any, residual: Any, index: int) -> Any:  # noqa: ANN401
        """The layer as instructions, which change the residual in place; `x` as in `__call__`."""
        x = self.input_norm.lower(program, x, residual)
        x = self.self_attn.lower(program, x, index)
        x = self.post_attention_norm.lower(program, x, residual)
        return self.mlp.lower(program, x)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, WeightSlot]]:
        """The checkpoint names below `prefix` with their places."""
        yield f"{prefix}input_layernorm.weight", WeightSlot(self.input_norm.weight)
        yield from self.self_attn.weight_slots(f"{prefix}self_attn.")
        yield (
            f"{prefix}post_attention_layernorm.weight",
            WeightSlot(self.post_attention_norm.weight),
        )
        yield from self.mlp.weight_slots(f"{prefix}mlp.")


class CausalLM(nn.Module):
    """A decoder with its output head.

    Tensors are made on torch's current device and hold nothing until `load_weights` or
    `init_dummy_weights`, one of which is called once.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = tuple(DecoderLayer(config, window, dtype) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = Linear(
            config.hidden_size,
            {"lm_head": config.vocab_size},
            dtype,
            weight=self.embed_tokens.weight if config.tie_word_embeddings else None,
        )
        self.rotary = RotaryEmbedding(config.rope, config.max_model_len)
        self.program: StepProgram | None = None

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, hidden_size] after the final norm; fills the caches.

        Runs the program that the layers were lowered to, or the layers where there is none.
        """
        metadata = batch.attention
        cos_sin, rows = self.rotary.rows(batch.positions, metadata)
        if self.program is not None and self.program.takes(batch.kv_caches[0].key):
            return self.program.run(
                StepTensors(
                    input_ids=batch.input_ids,
                    cos_sin=cos_sin,
                    rotary_rows=rows,
                    slot_mapping=metadata.slot_mapping,
                    batch=metadata,
                    caches=batch.kv_caches,
                )
            )
        x = self.embed_tokens(batch.input_ids)
        residual: Tensor | None = None
        rotation = Rotation(rows, cos_sin)
        for layer, cache in zip(self.layers, batch.kv_caches, strict=True):
            x, residual = layer(x, residual, rotation, cache, metadata)
        hidden, _ = self.norm.add_and_norm(x, residual)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, hidden_size] -> fp32 [L, vocab_size]."""
        return self.lm_head.logits(hidden)

    def cache_scales(self) -> tuple[CacheScales, ...]:
        """The scales of each layer for a cache in e4m3; they follow from the weights alone."""
        gain = self.rotary.gain
        return tuple(
            layer.self_attn.cache_scales(layer.input_norm.weight, gain) for layer in self.layers
        )

    def weight_bytes(self, int8: bool) -> int:
        """Bytes that the weights will take, linear layers in `int8` or not; before loading only."""
        dtype, table = self.dtype, self.embed_tokens.weight
        linear_bytes = ops.INT8_WEIGHT_BYTES if int8 else dtype.itemsize
        total = 0.0
        for _, slot in self._weight_slots():
            is_linear = slot.layer is not None and slot.target is not table
            total += slot.target.numel() * (linear_bytes if is_linear else dtype.itemsize)
        if self.config.tie_word_embeddings and (int8 or self._is_repacked()):
            total += table.numel() * linear_bytes
        return int(total)

    def _is_repacked(self) -> bool:
        """Whether a tied head is a copy of the embeddings, as kernels that run programs pack it."""
        try:
            ops.new_step_program(self.dtype, self.embed_tokens.weight.device)
        except NoLoweringError:
            return False
        return True

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fills the model from (name in the checkpoint, tensor) pairs, each used once and let go.

        Raises CheckpointError, naming tensors, when one is missing, double or of a wrong shape.
        Tensors without a place are left out with one warning. With tied embeddings a `lm_head` in
        the checkpoint is such a tensor, even where it differs from them: the configuration decides.
        """
        load_weights(dict(self._weight_slots()), weights)
        self._lower()

    def init_dummy_weights(self, seed: int) -> None:
        """Fills the model with random weights, the same for the same seed; for measuring."""
        slots = dict(self._weight_slots())
        load_weights(slots, dummy_weights(slots, seed))
        self._lower()

    def _lower(self) -> None:
        try:
            program = ops.new_step_program(self.dtype, self.embed_tokens.weight.device)
            residual = program.embedding(self.embed_tokens.weight)
            x = None
            for index, layer in enumerate(self.layers):
                x = layer.lower(program, x, residual, index)
            program.output_norm(x, residual, self.norm.weight, self.norm.eps)
        except NoLoweringError as reason:
            logger.info("the layers run one by one, since there are no programs for %s", reason)
            return
        self.program = program

    def _weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        config = self.config
        embedding = self.embed_tokens.weight
        head = self.lm_head if config.tie_word_embeddings else None
        yield "model.embed_tokens.weight", WeightSlot(embedding, head)
        for index, layer in enumerate(self.layers):
            yield from layer.weight_slots(f"model.layers.{index}.")
        yield "model.norm.weight", WeightSlot(self.norm.weight)
        if not config.tie_word_embeddings:
            yield from self.lm_head.weight_slots("")
