"""The same tiny random model twice: Octavo's and transformers', the latter eager and in fp32."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from paged_driver import PagedDriver
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from octavo.config.model import model_config_from_hf
from octavo.engine.models.decoder import CausalLM
from octavo.engine.models.registry import build_model
from octavo.kernels import ops

BASE: dict[str, Any] = {
    "vocab_size": 515,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
"""Keys of config.json that all families share."""


@dataclass(frozen=True)
class Pair:
    """One set of weights in two implementations."""

    ours: CausalLM
    theirs: PreTrainedModel

    def driver(self, cache_dtype: torch.dtype | None = None) -> PagedDriver:
        """Fresh caches for our model."""
        return PagedDriver(self.ours, cache_dtype=cache_dtype)

    @torch.no_grad()
    def expected(self, ids: Sequence[int]) -> Tensor:
        """Logits [n, vocab] of transformers, computed in one pass."""
        logits: Tensor = self.theirs(torch.tensor([list(ids)])).logits[0]
        return logits

    def assert_greedy(self, prompt: Sequence[int], produced: Sequence[int]) -> None:
        """`produced` is what transformers decodes greedily after `prompt`.

        Checked in one pass: each token must be the best after all before it.
        """
        logits = self.expected([*prompt, *produced])
        best = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert best == list(produced)


def make_hf(family: str, seed: int = 0, **keys: Any) -> PreTrainedModel:
    """A model of transformers whose weights are large enough for clear winners."""
    config = AutoConfig.for_model(family, **{**BASE, "initializer_range": 0.2, **keys})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                # Biases of zero and norms of one would hide a mix-up.
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def load_ours(
    model: PreTrainedModel, dtype: torch.dtype = torch.float32, *, int8: bool = False
) -> CausalLM:
    """Our model with the weights and the config.json of `model`; `int8` quantizes them."""
    saved = json.loads(model.config.to_json_string(use_diff=False))
    ours = build_model(model_config_from_hf(saved), dtype, torch.device("cpu"))
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    with ops.int8_weights() if int8 else nullcontext():
        ours.load_weights(weights.items())
    return ours


def make_pair(family: str, seed: int = 0, **keys: Any) -> Pair:
    """Both models, from the keys of a config.json."""
    theirs = make_hf(family, seed, **keys)
    return Pair(load_ours(theirs), theirs)


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, BASE["vocab_size"], (count,), generator=generator).tolist()
