"""Rotary variants against transformers, at positions up to three times the original length."""

from typing import Any

import pytest
import torch
from hf_pair import Pair, make_pair, random_ids
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama import modeling_llama

TOLERANCE = 1e-4
ORIGINAL = 32
LENGTHS = (1, 2, ORIGINAL, ORIGINAL + 1, ORIGINAL + 2, 3 * ORIGINAL + 1)

YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"rope_theta": 10000.0, "max_position_embeddings": 128},
    "theta": {"rope_theta": 1e6, "max_position_embeddings": 128},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear-rope-type": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "dynamic-theta": {"rope_scaling": {"type": "dynamic", "factor": 3.5}, "rope_theta": 1e6},
    "yarn": {"rope_scaling": {"type": "yarn", **YARN}},
    "yarn-attention-factor": {
        "rope_scaling": {"rope_type": "yarn", "attention_factor": 1.4, **YARN}
    },
    "yarn-mscale": {
        "rope_scaling": {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.4, **YARN}
    },
    "yarn-betas-untruncated": {
        "rope_scaling": {
            "rope_type": "yarn",
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            **YARN,
        }
    },
    "llama3": {
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        "max_position_embeddings": 4 * ORIGINAL,
        "rope_theta": 500000.0,
    },
    "parameters": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN},
    },
}


def rope_pair(name: str) -> Pair:
    keys = {"head_dim": 32, "max_position_embeddings": ORIGINAL, **VARIANTS[name]}
    return make_pair("llama", **keys)


@pytest.mark.parametrize("name", VARIANTS)
def test_f13_rope_variants(name: str) -> None:
    pair = rope_pair(name)
    ids = random_ids(max(LENGTHS))
    driver = pair.driver()
    # Ascending: transformers keeps the frequencies of the longest sequence that it has seen.
    for length in LENGTHS:
        logits = driver.prefill(0, ids[:length])
        driver.free(0)
        torch.testing.assert_close(logits, pair.expected(ids[:length]), atol=TOLERANCE, rtol=0)


def step_by_step(model: PreTrainedModel, ids: list[int], prompt: int) -> Tensor:
    """Logits of transformers with its cache: the prompt at once, then one token at a time."""
    with torch.no_grad():
        # By place: the argument's name differs between versions.
        cache = DynamicCache(config=model.config)
        rows = [model(torch.tensor([ids[:prompt]]), None, None, cache).logits[0]]
        for token in ids[prompt:]:
            rows.append(model(torch.tensor([[token]]), None, None, cache).logits[0])
    return torch.cat(rows)


def test_f13_dynamic_grows_with_each_decoded_token() -> None:
    pair = rope_pair("dynamic")
    ids = random_ids(3 * ORIGINAL)
    other = random_ids(ORIGINAL - 1, seed=1)
    driver = pair.driver()
    # A short neighbour in every step must not see the frequencies of the long sequence.
    first = driver.step({0: ids[: ORIGINAL - 4], 1: other[:1]})
    rows, others = [first[0]], [first[1]]
    for place, token in enumerate(ids[ORIGINAL - 4 :]):
        neighbour = other[place + 1 : place + 2]
        logits = driver.step({1: neighbour, 0: [token]} if neighbour else {0: [token]})
        rows.append(logits[0])
        others += [logits[1]] if neighbour else []
    expected = pair.expected(other)
    torch.testing.assert_close(torch.cat(others), expected, atol=TOLERANCE, rtol=0)
    expected = step_by_step(pair.theirs, ids, ORIGINAL - 4)
    torch.testing.assert_close(torch.cat(rows), expected, atol=TOLERANCE, rtol=0)


def rotate_part(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates as many leading components as there are cosines, as GPT-NeoX does."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    size = cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        part = x[..., :size]
        turned = part * cos + modeling_llama.rotate_half(part) * sin
        return torch.cat((turned, x[..., size:]), dim=-1)

    return rotate(q), rotate(k)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_f13_partial_rotary(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers reads the share for scaled variants only, and its Llama cannot apply it.
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate_part)
    rope = {"rope_type": "linear", "factor": 1.0, "partial_rotary_factor": share}
    pair = make_pair("llama", head_dim=32, rope_parameters={"rope_theta": 10000.0, **rope})
    assert pair.ours.config.rope.rotary_dim == 32 * share
    ids = random_ids(40)
    logits = pair.driver().prefill(0, ids, 7)
    torch.testing.assert_close(logits, pair.expected(ids), atol=TOLERANCE, rtol=0)
