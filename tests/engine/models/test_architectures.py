"""Every architecture and option against transformers, over paged caches full of NaN."""

from typing import Any

import pytest
import torch
from hf_pair import Pair, load_ours, make_hf, make_pair, random_ids

TOLERANCE = 1e-4
BORDER_LENGTHS = (1, 15, 16, 17, 31, 32, 33)

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 18, "max_window_layers": 1},
    ),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 24}),
    "qwen3-bias-layer-types": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=str)
def pair(request: pytest.FixtureRequest) -> Pair:
    family, keys = ARCHITECTURES[request.param]
    return make_pair(family, **keys)


@pytest.mark.parametrize("chunk", [None, 7, 16, 1])
def test_logits_equal_transformers_at_block_borders(pair: Pair, chunk: int | None) -> None:
    ids = random_ids(max(BORDER_LENGTHS))
    expected = pair.expected(ids)
    driver = pair.driver()
    for length in BORDER_LENGTHS:
        logits = driver.prefill(0, ids[:length], chunk)
        torch.testing.assert_close(logits, expected[:length], atol=TOLERANCE, rtol=0)
        driver.free(0)


def test_greedy_ids_equal_transformers_in_company(pair: Pair) -> None:
    prompts = {length: random_ids(length, seed=length) for length in BORDER_LENGTHS}
    produced = pair.driver().greedy(prompts, 36)
    for length, prompt in prompts.items():
        pair.assert_greedy(prompt, produced[length])


def test_step_of_prompts_chunks_and_single_tokens(pair: Pair) -> None:
    texts = {row: random_ids(40, seed=row) for row in range(5)}
    driver = pair.driver()
    driver.step({row: texts[row][:20] for row in (0, 1, 2)})
    logits = driver.step(
        {
            3: texts[3],
            0: texts[0][20:21],
            4: texts[4][:1],
            1: texts[1][20:33],
            2: texts[2][20:21],
        }
    )
    for row, rows in logits.items():
        start = 20 if row < 3 else 0
        expected = pair.expected(texts[row][: start + len(rows)])[start:]
        torch.testing.assert_close(rows, expected, atol=TOLERANCE, rtol=0)


HEADS = [(4, 4), (6, 2), (5, 1), (12, 2), (14, 2), (7, 1), (8, 8)]
HEAD_DIMS = [16, 40, 64, 80, 96, 128, 192, 256]
F11_SHAPES = [
    *((16, heads) for heads in HEADS),
    *((size, HEADS[index % len(HEADS)]) for index, size in enumerate(HEAD_DIMS[1:], 1)),
]


@pytest.mark.parametrize(("head_dim", "heads"), F11_SHAPES)
def test_f11_head_sizes_and_ratios(head_dim: int, heads: tuple[int, int]) -> None:
    pair = make_pair(
        "llama",
        hidden_size=8 * heads[0],
        head_dim=head_dim,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
    )
    prompts = {length: random_ids(length, seed=length) for length in (1, 7, 16, 29, 40)}
    driver = pair.driver()
    for batch in (prompts, {99: prompts[40]}):
        produced = driver.greedy(batch, 40)
        for row, prompt in batch.items():
            pair.assert_greedy(prompt, produced[row])
    ids = random_ids(40)
    torch.testing.assert_close(driver.prefill(100, ids), pair.expected(ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_transformers(dtype: torch.dtype) -> None:
    theirs = make_hf("qwen3", initializer_range=0.05)
    ids = random_ids(24)
    ours = load_ours(theirs, dtype)
    with torch.no_grad():
        exact = theirs(torch.tensor([ids])).logits[0]
        rounded = theirs.to(dtype)(torch.tensor([ids])).logits[0].float()
    logits = Pair(ours, theirs).driver().prefill(0, ids)
    # Both round at the same places, so neither may stray further from fp32 than the other does.
    assert (logits - exact).abs().max() < 2 * (rounded - exact).abs().max()
