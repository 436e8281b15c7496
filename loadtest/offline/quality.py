"""`octavo bench quality`: what int8 weights change in a model's predictions of a fixed text.

The text is Python's own documentation, which ships with it. Beside `--quantization int8` stands
Q8_0, the 8-bit format of llama.cpp, as the `gguf` package rounds it: the class to meet. Only its
weights are rounded here; llama.cpp rounds activations to 8 bits too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from octavo.config.engine import EngineConfig
from octavo.engine.attention.metadata import (
    AttentionMetadata,
    ForwardBatch,
    KVCacheLayout,
    LayerKVCache,
)
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.loader import Checkpoint, EncoderCheckpoint, resolve_checkpoint
from octavo.engine.loader.filling import load_model
from octavo.engine.models.decoder import CausalLM
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.worker.memory import resolve_dtype
from octavo.kernels import ops

_CPU = torch.device("cpu")
_BLOCK_SIZE = 16
_Q8_GROUP = 32
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_COLUMNS = (
    f"{'weights':<10} {'computed in':<12} {'compared with':<20} {'mean KL':>10} {'P99 KL':>10} "
    f"{'same top-1':>10}"
)


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the predictions of one model are from those of another.

    `mean_kl` and `p99_kl` are of KL(other || this) over the positions, in nats; `top1` is the
    share of them at which both find the same token most likely.
    """

    mean_kl: float
    p99_kl: float
    top1: float


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One model compared with that of the checkpoint's weights, which computes in `reference`."""

    weights: str
    computed_in: str
    reference: str
    distance: Distance


@dataclass(frozen=True, slots=True)
class QualityReport:
    """All comparisons."""

    title: str
    rows: Sequence[QualityRow]

    def render(self) -> str:
        """The printed table."""
        return "\n".join([self.title, _COLUMNS, *map(_line, self.rows)])

    def to_json(self) -> dict[str, Any]:
        """All figures by their names."""
        return {"title": self.title, "comparisons": [asdict(row) for row in self.rows]}


def _line(row: QualityRow) -> str:
    distance = row.distance
    return (
        f"{row.weights:<10} {row.computed_in:<12} {'as they are, ' + row.reference:<20} "
        f"{distance.mean_kl:>10.6f} {distance.p99_kl:>10.6f} {distance.top1:>10.2%}"
    )


def distance(reference: Tensor, other: Tensor) -> Distance:
    """Of logits [N, V] to those of the reference."""
    divergences = torch.cat([_divergences(*rows) for rows in zip(reference, other, strict=True)])
    same = (reference.argmax(1) == other.argmax(1)).double().mean()
    return Distance(
        float(divergences.mean()), float(torch.quantile(divergences, 0.99)), float(same)
    )


def _divergences(reference: Tensor, other: Tensor) -> Tensor:
    expected = reference.double().log_softmax(0)
    return (expected.exp() * (expected - other.double().log_softmax(0))).sum()[None]


def measure_quality(
    config: EngineConfig, num_tokens: int, context: int, on_row: Callable[[QualityRow], None]
) -> QualityReport:
    """Compare over `num_tokens` tokens, in texts of `context` tokens, on the CPU.

    Raises ConfigurationError where the model or the processor has no int8 weights.
    """
    checkpoint = resolve_checkpoint(config.load)
    if isinstance(checkpoint, EncoderCheckpoint):
        raise ConfigurationError(f"{checkpoint.name} is an encoder, which predicts no tokens")
    served = resolve_dtype(config.load.dtype, checkpoint.model_config)
    if not all(ops.can_quantize(dtype, _CPU) for dtype in (served, torch.float32)):
        raise ConfigurationError("int8 weights need the CPU's own kernels, which cannot be used")
    ops.set_cpu_threads(served, config.device.num_cpu_threads)
    tokenizer = Tokenizer.from_directory(checkpoint.tokenizer_dir)
    ids = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))[:num_tokens]
    context = min(context, checkpoint.model_config.max_model_len)
    texts = [ids[start : start + context] for start in range(0, len(ids), context)]

    def logits(dtype: torch.dtype, weights: str) -> Tensor:
        return _predict(_load(checkpoint, dtype, weights), texts)

    rows: list[QualityRow] = []

    def compare(weights: str, dtype: torch.dtype, reference: Tensor, computed: torch.dtype) -> None:
        row = QualityRow(
            weights, _name(dtype), _name(computed), distance(reference, logits(dtype, weights))
        )
        rows.append(row)
        on_row(row)

    exact = logits(torch.float32, "as they are")
    compare("int8", torch.float32, exact, torch.float32)
    compare("Q8_0", torch.float32, exact, torch.float32)
    if served != torch.float32:
        compare("as they are", served, exact, torch.float32)
        compare("int8", served, exact, torch.float32)
        del exact
        compare("int8", served, logits(served, "as they are"), served)
    title = f"{checkpoint.name}: {len(ids)} tokens of Python's documentation in texts of {context}"
    return QualityReport(title, rows)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load(checkpoint: Checkpoint, dtype: torch.dtype, weights: str) -> CausalLM:
    with ExitStack() as packing:
        if weights == "int8":
            packing.enter_context(ops.int8_weights())
        return load_model(_rounded(checkpoint) if weights == "Q8_0" else checkpoint, dtype, _CPU)


def _rounded(checkpoint: Checkpoint) -> Checkpoint:
    """The same with the weights of linear layers in Q8_0; embeddings stay as they are."""
    read, facts = checkpoint.weights, checkpoint.model_config
    if read is None:
        raise ConfigurationError("random weights (--load-format dummy) say nothing about quality")
    tied = facts.tie_word_embeddings
    return replace(
        checkpoint,
        model_config=facts.model_copy(update={"tie_word_embeddings": False}),
        weights=lambda: _round_linear(read(), tied),
    )


def _round_linear(
    weights: Iterable[tuple[str, Tensor]], tied: bool
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if name.endswith("_proj.weight") or (name == _HEAD and not tied):
            yield name, round_q8_0(tensor)
        elif name != _HEAD:
            yield name, tensor
        if name.endswith(_EMBEDDING) and tied:
            yield _HEAD, round_q8_0(tensor)


def round_q8_0(weight: Tensor) -> Tensor:
    """The float32 that Q8_0 keeps of `weight`; rows that no groups fill stay, as in llama.cpp."""
    wide = weight.float().numpy()
    if wide.shape[1] % _Q8_GROUP:
        return weight.float()
    stored = quantize(np.ascontiguousarray(wide), GGMLQuantizationType.Q8_0)
    return torch.from_numpy(dequantize(stored, GGMLQuantizationType.Q8_0))


@torch.inference_mode()
def _predict(model: CausalLM, texts: Sequence[Sequence[int]]) -> Tensor:
    """Logits [N, V] of all tokens, each text by itself."""
    facts = model.config
    blocks = -(-max(map(len, texts)) // _BLOCK_SIZE)
    layout = KVCacheLayout(blocks, facts.num_kv_heads, _BLOCK_SIZE, facts.head_dim, model.dtype)
    caches = tuple(
        LayerKVCache(*(torch.zeros(layout.shape, dtype=layout.dtype) for _ in range(2)))
        for _ in range(facts.num_layers)
    )
    return torch.cat([_logits(model, text, blocks, caches) for text in texts])


def _logits(
    model: CausalLM, text: Sequence[int], blocks: int, caches: tuple[LayerKVCache, ...]
) -> Tensor:
    length = len(text)
    places = torch.arange(length)
    metadata = AttentionMetadata(
        slot_mapping=places,
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        seq_lens=torch.tensor([length], dtype=torch.int32),
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        max_query_len=length,
        max_seq_len=length,
    )
    hidden = model(ForwardBatch(torch.tensor(text), places, places, metadata, caches))
    return model.compute_logits(hidden)
