"""A KV cache in e4m3: scales from the weights, and what the model makes of what it holds."""

import pytest
import torch
from fake_stream import FakeStream
from hf_pair import Pair, make_pair, random_ids
from model_engine import ModelEngine

from octavo.engine.attention.scales import e4m3_scales
from octavo.kernels import ops

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 10000.0},
}
FP8 = torch.float8_e4m3fn


def pair_for(name: str) -> Pair:
    with ops.reference_only():  # as on a GPU: weights stay as they are
        pair = make_pair("llama" if name == "yarn" else name, **FAMILIES[name])
    pair.ours.program = None
    return pair


def test_scales_are_the_smallest_powers_of_two_that_hold_the_bounds() -> None:
    bounds = torch.tensor([[1.0, 448.0], [449.0, -0.0], [0.0, 7.0], [0.0, 0.0]])
    scales = e4m3_scales(bounds)
    assert scales[:3].tolist() == [1.0, 2.0, 2.0**-6]
    assert scales[3] > 0 and (torch.zeros(1) / scales[3]).isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_that_is_cached_leaves_the_range_of_its_scale(name: str) -> None:
    pair = pair_for(name)
    driver = pair.driver()
    driver.prefill(0, random_ids(200, seed=3))
    for layer, (key_scale, value_scale) in zip(
        driver.layers, pair.ours.cache_scales(), strict=True
    ):
        for cache, scale in ((layer.key, key_scale), (layer.value, value_scale)):
            largest = cache.nan_to_num(0.0).abs().amax(dim=(0, 2, 3))  # the rest is NaN
            assert (largest > 0).all() and (largest <= 448 * scale).all()
            # Loose bounds would push small values out of the range at its other end.
            assert (largest > 448 * scale / 2**10).all()


def test_texts_of_the_engine_are_those_of_one_pass_over_the_rounded_cache() -> None:
    pair = pair_for("qwen3")
    prompts = {str(length): random_ids(length, seed=length) for length in (2, 9, 30)}
    engine = ModelEngine(pair.ours, stream=FakeStream(), cache_dtype=FP8)
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=12)
        engine.step()
    engine.run()
    for name, prompt in prompts.items():
        driver = pair.driver(cache_dtype=FP8)
        text = engine.text(name)
        logits = driver.prefill(0, prompt + text)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == text
        assert not logits.equal(pair.driver().prefill(0, prompt + text)), "nothing was rounded"
