"""Facts read from config.json."""

from typing import Any

import pytest

from octavo.config.model import ModelConfig, model_config_from_hf

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def read(**keys: Any) -> ModelConfig:
    return model_config_from_hf({**LLAMA, **keys})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 4096),
        ({"sliding_window": 512, "model_type": "mistral"}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_scaling": LLAMA3}, 4096),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 4096,
                }
            },
            16384,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 4096,
                },
                "max_position_embeddings": 131072,
            },
            16384,
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 16384),
        (
            {
                "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1024},
            },
            4096,
        ),
    ],
)
def test_f17_context_length(keys: dict[str, Any], expected: int) -> None:
    assert read(**keys).max_model_len == expected


def test_silent_keys_take_the_defaults_of_transformers() -> None:
    config = read(num_key_value_heads=None)
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.rope.theta == 10000.0
    assert config.rope.rotary_dim == 16
    assert config.windows == (None, None, None)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": None}, "float32"),
    ],
)
def test_h01_precision_of_the_checkpoint(keys: dict[str, Any], expected: str) -> None:
    assert read(**keys).dtype == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(7, (7,)), ([7, 8], (7, 8)), (None, ())], ids=["one", "list", "none"]
)
def test_end_of_text_ids(value: Any, expected: tuple[int, ...]) -> None:
    assert read(eos_token_id=value).eos_token_ids == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "mistral"}, (4096, 4096, 4096)),
        ({"model_type": "llama", "sliding_window": 8}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None, None)),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 8, 8),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows_per_layer(keys: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert read(**keys).windows == expected


@pytest.mark.parametrize(
    ("model_type", "attention_bias", "expected"),
    [
        ("llama", True, (True, True)),
        ("llama", False, (False, False)),
        ("mistral", True, (False, False)),
        ("qwen2", False, (True, False)),
        ("qwen3", True, (True, True)),
    ],
)
def test_biases_of_the_projections(
    model_type: str, attention_bias: bool, expected: tuple[bool, bool]
) -> None:
    config = read(model_type=model_type, attention_bias=attention_bias)
    assert (config.qkv_bias, config.attention_out_bias) == expected


def test_rope_keys_beside_and_inside_mean_the_same() -> None:
    beside = read(
        rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5e5, partial_rotary_factor=0.5
    )
    inside = read(
        rope_parameters={
            "rope_type": "linear",
            "factor": 2.0,
            "rope_theta": 5e5,
            "partial_rotary_factor": 0.5,
        }
    )
    assert beside == inside
    assert beside.rope.rotary_dim == 8


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported are llama, mistral"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"rope_scaling": {"type": "foo"}}, "'foo' is not supported; .*linear, dynamic, llama3"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' lacks factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "lacks low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor: .*number"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor: .*finite"),
        ({"rope_parameters": {"full_attention": {}}}, "between layer types"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported; supported are silu"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, not None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a positive integer, not '2'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, not 0"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 5}, "rotary_dim: .*multiple of 2"),
        ({"head_dim": "16"}, "wrong type"),
        ({"hidden_act": ["silu"]}, "wrong type"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "1 windows for 3 layers",
        ),
    ],
)
def test_faults_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**keys)


def test_a_contradiction_is_told_without_the_names_of_the_library() -> None:
    with pytest.raises(ValueError, match="heads") as caught:
        read(num_attention_heads=5, num_key_value_heads=3)
    assert "Value error" not in str(caught.value)
