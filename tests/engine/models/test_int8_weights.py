"""Models with int8 weights, beside transformers in fp32."""

from typing import Any

import pytest
import torch
from hf_pair import Pair, load_ours, make_hf, random_ids
from paged_driver import PagedDriver
from torch import Tensor

from octavo.engine.loader import Checkpoint
from octavo.engine.loader.filling import load_model
from octavo.engine.tokenizer import Tokenizer
from octavo.kernels import ops
from octavo.kernels.cpu.quantize import quantize_weight

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-gelu": ("mistral", {"hidden_act": "gelu", "sliding_window": 9}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
}
_SIZES = {"hidden_size": 64, "intermediate_size": 96}


def _stored(weight: Tensor) -> Tensor:
    numbers, scales = quantize_weight(weight)
    return (numbers.float() * scales.float()[..., None]).flatten(1)


@pytest.fixture(params=_MODELS)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Ours with int8 weights, and transformers with the weights that these stand for."""
    family, keys = _MODELS[request.param]
    theirs = make_hf(family, **_SIZES, **keys)
    ours = load_ours(theirs, int8=True)
    if theirs.config.tie_word_embeddings:
        # Only the head is quantized, the embeddings are not.
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    for module in theirs.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = _stored(module.weight.data)
    return Pair(ours, theirs)


def test_logits_are_those_of_the_stored_weights(pair: Pair) -> None:
    assert pair.ours.program is not None
    ids = random_ids(40)
    logits = pair.driver().prefill(0, ids, 17)
    torch.testing.assert_close(logits, pair.expected(ids), atol=2e-3, rtol=0)


def test_predictions_stay_close_to_the_weights_as_they_were() -> None:
    theirs = make_hf("llama", **_SIZES, initializer_range=0.1)
    ids = random_ids(60)
    expected = Pair(load_ours(theirs), theirs).expected(ids)
    logits = Pair(load_ours(theirs, int8=True), theirs).driver().prefill(0, ids)
    assert not torch.equal(logits, expected)
    assert (logits - expected).norm() < 0.02 * expected.norm()


def test_the_starter_model_still_knows(starter_checkpoint: Checkpoint) -> None:
    tokenizer = Tokenizer.from_directory(starter_checkpoint.tokenizer_dir)
    with ops.int8_weights():
        model = load_model(starter_checkpoint, torch.bfloat16, torch.device("cpu"))
    prompt = tokenizer.encode(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    (produced,) = PagedDriver(model).greedy({0: prompt}, 7).values()
    assert tokenizer.decode(produced).startswith("The capital of France is Paris.")
