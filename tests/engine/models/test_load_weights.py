"""What a model accepts as its weights."""

import logging

import pytest
import torch
from hf_pair import Pair, load_ours, make_hf, random_ids
from paged_driver import PagedDriver
from torch import Tensor

from octavo.config.model import ModelConfig, RopeConfig
from octavo.engine.core.errors import CheckpointError
from octavo.engine.models.decoder import CausalLM
from octavo.engine.models.registry import build_model
from octavo.kernels import ops


def tiny_config(*, tied: bool, model_type: str = "llama") -> ModelConfig:
    return ModelConfig(
        model_type=model_type,
        vocab_size=7,
        hidden_size=4,
        intermediate_size=6,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        rope=RopeConfig(rotary_dim=2),
        windows=(None, None),
        max_model_len=32,
        dtype="float32",
    )


def tiny_model(*, tied: bool) -> CausalLM:
    return build_model(tiny_config(tied=tied), torch.float32, torch.device("cpu"))


def tiny_weights(*, head: bool) -> dict[str, Tensor]:
    shapes = {"model.embed_tokens.weight": (7, 4), "model.norm.weight": (4,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {
            f"{layer}input_layernorm.weight": (4,),
            f"{layer}post_attention_layernorm.weight": (4,),
            f"{layer}self_attn.q_proj.weight": (4, 4),
            f"{layer}self_attn.k_proj.weight": (2, 4),
            f"{layer}self_attn.v_proj.weight": (2, 4),
            f"{layer}self_attn.o_proj.weight": (4, 4),
            f"{layer}mlp.gate_proj.weight": (6, 4),
            f"{layer}mlp.up_proj.weight": (6, 4),
            f"{layer}mlp.down_proj.weight": (4, 6),
        }
    if head:
        shapes["lm_head.weight"] = (7, 4)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def logits_of(model: CausalLM) -> Tensor:
    return PagedDriver(model, num_blocks=2).prefill(0, [1, 2, 3])


def loaded(*, tied: bool, weights: dict[str, Tensor]) -> CausalLM:
    model = tiny_model(tied=tied)
    model.load_weights(weights.items())
    return model


def test_h04_tied_without_head_takes_the_embeddings() -> None:
    weights = tiny_weights(head=False)
    logits = logits_of(loaded(tied=True, weights=weights))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    torch.testing.assert_close(logits, logits_of(loaded(tied=False, weights=weights)))


def test_h04_tied_with_another_head_takes_the_embeddings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = tiny_weights(head=True)
    with caplog.at_level(logging.WARNING):
        logits = logits_of(loaded(tied=True, weights=weights))
    assert "lm_head.weight" in caplog.text
    without = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    torch.testing.assert_close(logits, logits_of(loaded(tied=True, weights=without)))


def test_h04_untied_with_head_uses_it() -> None:
    theirs = make_hf("llama", tie_word_embeddings=False)
    ids = random_ids(5)
    pair = Pair(load_ours(theirs), theirs)
    torch.testing.assert_close(pair.driver().prefill(0, ids), pair.expected(ids), atol=1e-4, rtol=0)


def test_h04_untied_without_head_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        loaded(tied=False, weights=tiny_weights(head=False))


def test_h04_missing_tensors_are_named_and_counted() -> None:
    weights = {
        name: tensor for name, tensor in tiny_weights(head=True).items() if "layers.1" not in name
    }
    with pytest.raises(CheckpointError) as error:
        loaded(tied=False, weights=weights)
    assert "model.layers.1.input_layernorm.weight, " in str(error.value)
    assert str(error.value).endswith(" and 4 more")


def test_h04_one_missing_part_of_a_fused_layer_is_named() -> None:
    weights = tiny_weights(head=True)
    del weights["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(
        CheckpointError, match=r"lacks model\.layers\.0\.self_attn\.k_proj\.weight$"
    ):
        loaded(tied=False, weights=weights)


@pytest.mark.parametrize("rows", [6, 8])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_h04_other_vocabulary_size_is_refused(name: str, rows: int) -> None:
    weights = tiny_weights(head=True)
    weights[name] = torch.zeros(rows, 4)
    with pytest.raises(CheckpointError, match=rf"{name} has the shape \[{rows}, 4\].*\[7, 4\]"):
        loaded(tied=False, weights=weights)


def test_h04_extra_tensors_give_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    extra = {f"stray.{index}": torch.zeros(1) for index in range(7)}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(1)
    with caplog.at_level(logging.WARNING):
        loaded(tied=False, weights=tiny_weights(head=True) | extra)
    (record,) = caplog.records
    assert "stray.0, stray.1, stray.2, stray.3, stray.4 and 2 more" in record.getMessage()


def test_double_tensor_is_refused() -> None:
    weights = list(tiny_weights(head=True).items())
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight more than once"):
        tiny_model(tied=False).load_weights([*weights[:3], weights[1]])


def test_names_of_the_bare_decoder_are_taken() -> None:
    weights = tiny_weights(head=False)
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    torch.testing.assert_close(
        logits_of(loaded(tied=True, weights=bare)), logits_of(loaded(tied=True, weights=weights))
    )


@pytest.mark.parametrize("tied", [True, False])
def test_dummy_weights_follow_their_seed(tied: bool) -> None:
    def logits(seed: int) -> Tensor:
        model = tiny_model(tied=tied)
        model.init_dummy_weights(seed)
        return logits_of(model)

    assert torch.isfinite(logits(1)).all()
    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_unknown_model_type_lists_what_is_supported() -> None:
    with pytest.raises(CheckpointError, match=r"'mamba'.*llama, mistral, qwen2, qwen3"):
        build_model(tiny_config(tied=True, model_type="mamba"), torch.float32, torch.device("cpu"))


def test_layers_without_a_program_say_for_which_kernels(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(tied=True)
    with ops.reference_only(), caplog.at_level(logging.INFO):
        model.load_weights(tiny_weights(head=False).items())
    assert caplog.messages == [
        "the layers run one by one, since there are no programs for the kernels for float32 on cpu"
    ]
