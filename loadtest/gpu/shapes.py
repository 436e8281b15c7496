"""What is measured: on a GPU, and in tiny on CPU."""

from dataclasses import dataclass

from octavo.config.model import ModelConfig, RopeConfig
from octavo.kernels.triton.tiles import Tiles


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads and head size of an attention."""

    query: int
    kv: int
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run does; sizes in tokens and rows.

    Calls take turns over so many copies of their inputs that these pass `flush_bytes`, so that
    nothing is in a cache of the GPU that would not be there in a model. At least `calls` are timed
    in a row.
    """

    device: str
    dtype: str
    heads: Heads
    checked_heads: tuple[Heads, ...]
    decode_batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    linear_rows: tuple[int, ...]
    linear_shape: tuple[int, int]
    swept_batches: tuple[int, ...]
    decode_tiles: tuple[Tiles, ...]
    prefill_tiles: tuple[Tiles, ...]
    flush_bytes: int
    repeats: int
    calls: int
    models: tuple[ModelConfig, ...]
    model_batches: tuple[int, ...]
    model_prompt: int
    model_output: int


def _model(family: str, hidden: int, inner: int, layers: int, heads: Heads) -> ModelConfig:
    return ModelConfig(
        model_type=family,
        vocab_size=128256 if family == "llama" else 151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads.query,
        num_kv_heads=heads.kv,
        head_dim=heads.size,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rotary_dim=heads.size),
        windows=(None,) * layers,
        max_model_len=16384,
        qk_norm=family == "qwen3",
        tie_word_embeddings=family == "qwen3",
        dtype="bfloat16",
    )


GPU = Plan(
    device="cuda",
    dtype="bfloat16",
    heads=Heads(32, 8, 128),
    checked_heads=(Heads(8, 8, 64), Heads(9, 3, 80), Heads(28, 4, 128), Heads(32, 8, 128)),
    decode_batches=(1, 8, 64, 256),
    contexts=(1024, 4096, 16384),
    prompts=(1024, 8192),
    linear_rows=(1, 2, 4, 8, 16, 32),
    linear_shape=(4096, 4096),
    swept_batches=(1, 8, 64),
    decode_tiles=(
        Tiles(16, 32, 4, 3),
        Tiles(16, 64, 4, 3),
        Tiles(16, 64, 8, 3),
        Tiles(16, 128, 4, 2),
        Tiles(16, 128, 8, 3),
    ),
    prefill_tiles=(
        Tiles(64, 64, 4, 2),
        Tiles(128, 32, 8, 3),
        Tiles(128, 64, 4, 3),
        Tiles(128, 64, 8, 3),
        Tiles(128, 128, 8, 2),
    ),
    flush_bytes=256 << 20,
    repeats=10,
    calls=8,
    models=(
        _model("llama", 4096, 14336, 32, Heads(32, 8, 128)),
        _model("qwen3", 1024, 3072, 28, Heads(16, 8, 128)),
    ),
    model_batches=(1, 8, 64, 256),
    model_prompt=128,
    model_output=64,
)

DRY = Plan(
    device="cpu",
    dtype="float32",
    heads=Heads(4, 2, 16),
    checked_heads=(Heads(4, 4, 16), Heads(3, 1, 24)),
    decode_batches=(1, 3),
    contexts=(40,),
    prompts=(33,),
    linear_rows=(1, 4),
    linear_shape=(64, 64),
    swept_batches=(1, 2),
    decode_tiles=(Tiles(16, 16, 4, 1), Tiles(16, 32, 4, 1)),
    prefill_tiles=(Tiles(16, 16, 4, 1), Tiles(32, 16, 4, 1)),
    flush_bytes=1,
    repeats=1,
    calls=1,
    models=(
        _model("qwen3", 32, 64, 1, Heads(2, 1, 16)).model_copy(
            update={"vocab_size": 97, "max_model_len": 128}
        ),
    ),
    model_batches=(1, 2),
    model_prompt=9,
    model_output=6,
)
