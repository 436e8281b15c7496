"""Beam search of the engine against transformers' generate, in fp32 over a small vocabulary."""

from typing import Any

import pytest
import torch
from hf_pair import Pair, make_pair
from model_engine import ModelEngine

from octavo.engine.core.errors import InvalidRequestError
from octavo.engine.core.limits import HostMemory
from octavo.engine.core.request import FinishReason

VOCAB_SIZE = 40
EOS = 16
RARE_EOS = 5


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair("llama", vocab_size=VOCAB_SIZE)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def expected(
    pair: Pair, ids: list[int], eos: tuple[int, ...], width: int, n: int, **options: Any
) -> list[tuple[list[int], float]]:
    """Texts up to their end token, with scores, best first."""
    output = pair.theirs.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        num_beams=width,
        num_return_sequences=n,
        do_sample=False,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    texts = []
    for sequence, score in zip(output.sequences, output.sequences_scores, strict=True):
        text = sequence[len(ids) :].tolist()
        end = next((place for place, token in enumerate(text) if token in eos), len(text) - 1)
        texts.append((text[: end + 1], float(score)))
    return texts


def check(
    engine: ModelEngine, name: str, wanted: list[tuple[list[int], float]], eos: tuple[int, ...]
) -> None:
    for index, (text, score) in enumerate(wanted):
        delta = engine.result(name, index)
        assert list(delta.token_ids) == text, (name, index)
        # Sums of fp32 log-probabilities in another order.
        assert delta.score == pytest.approx(score, rel=1e-5, abs=1e-4), (name, index)
        assert delta.finish_reason == ("stop" if text[-1] in eos else "length")


@pytest.mark.parametrize("eos", [EOS, RARE_EOS])
@pytest.mark.parametrize("length_penalty", [-1.0, 1.0, 2.5])
@pytest.mark.parametrize(("width", "n"), [(2, 1), (7, 5)])
def test_beams_and_scores_equal_transformers(
    pair: Pair, width: int, n: int, length_penalty: float, eos: int
) -> None:
    engine = ModelEngine(pair.ours, num_blocks=128, eos_token_ids=(eos,))
    options = {"use_beam_search": True, "best_of": width, "length_penalty": length_penalty}
    wanted = {}
    for seed in range(2):
        ids = prompt(5 + 4 * seed, seed)
        engine.add(f"r{seed}", ids, n=n, max_tokens=14, **options)
        wanted[f"r{seed}"] = expected(
            pair, ids, (eos,), width, n, max_new_tokens=14, length_penalty=length_penalty
        )
    engine.run()
    for name, texts in wanted.items():
        check(engine, name, texts, (eos,))


@pytest.mark.parametrize(
    ("seed", "eos", "length_penalty", "num_different"),
    [(8, RARE_EOS, -1.0, 1), (11, EOS, 1.0, 3), (0, 30, 1.0, 2), (0, 30, 2.5, 2)],
)
def test_searches_stop_as_early_as_those_of_transformers(
    pair: Pair, seed: int, eos: int, length_penalty: float, num_different: int
) -> None:
    ids, texts = prompt(7, seed), set()
    engine = ModelEngine(pair.ours, num_blocks=128, max_num_seqs=12, eos_token_ids=(eos,))
    options = {"max_tokens": 24, "use_beam_search": True, "length_penalty": length_penalty}
    for early_stopping in (True, False, "never"):
        engine.add(str(early_stopping), ids, n=3, early_stopping=early_stopping, **options)
    engine.run()
    for early_stopping in (True, False, "never"):
        theirs = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        wanted = expected(pair, ids, (eos,), 3, 3, max_new_tokens=24, **theirs)
        check(engine, str(early_stopping), wanted, (eos,))
        texts.add(str(wanted))
    assert len(texts) == num_different, "the case does not tell the rules apart"


def test_several_end_tokens_and_a_least_length(pair: Pair) -> None:
    eos, ids = (EOS, 11, 30), prompt(9, 7)
    engine = ModelEngine(pair.ours, eos_token_ids=eos[:2])
    engine.add(
        "a", ids, n=4, use_beam_search=True, max_tokens=12, min_tokens=3, stop_token_ids=eos[2:]
    )
    engine.run()
    texts = expected(pair, ids, eos, 4, 4, max_new_tokens=12, min_new_tokens=3)
    for index, (text, score) in enumerate(texts):
        delta = engine.result("a", index)
        assert (list(delta.token_ids), delta.score) == (text, pytest.approx(score, abs=1e-4))
        assert delta.stop_reason == (30 if text[-1] == 30 else None)


def test_end_tokens_may_be_ignored(pair: Pair) -> None:
    ids = prompt(9, 8)
    engine = ModelEngine(pair.ours, eos_token_ids=(EOS,))
    engine.add("a", ids, n=3, use_beam_search=True, max_tokens=10, ignore_eos=True)
    engine.run()
    check(engine, "a", expected(pair, ids, (), 3, 3, max_new_tokens=10), ())


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("caching", [True, False])
def test_f02_beams_survive_preemption(pair: Pair, caching: bool, mode: str) -> None:
    engine = ModelEngine(
        pair.ours,
        num_blocks=28,
        eos_token_ids=(RARE_EOS,),
        max_num_seqs=16,
        max_num_batched_tokens=17,
        cache={"enable_prefix_caching": caching},
        scheduler={"preemption_mode": mode},
        host_memory=HostMemory(200),
    )
    wanted = {}
    for seed in range(4):
        ids = prompt(10 + seed, 20 + seed)
        engine.add(f"r{seed}", ids, n=4, use_beam_search=True, max_tokens=20)
        wanted[f"r{seed}"] = expected(pair, ids, (RARE_EOS,), 4, 4, max_new_tokens=20)
    engine.run()
    stats = engine.engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_preemptions_by_swap > 0) == (mode == "swap")
    for name, texts in wanted.items():
        check(engine, name, texts, (RARE_EOS,))


def test_log_probabilities_of_beams_add_up(pair: Pair) -> None:
    engine = ModelEngine(pair.ours, eos_token_ids=(EOS,))
    ids = prompt(6, 3)
    engine.add("a", ids, n=2, use_beam_search=True, max_tokens=8, logprobs=2, prompt_logprobs=0)
    engine.run()
    for index in range(2):
        delta = engine.result("a", index)
        assert [record.token_id for record in delta.logprobs] == list(delta.token_ids)
        assert {len(record.top) for record in delta.logprobs} == {2}
        total = sum(record.logprob for record in delta.logprobs)
        assert delta.cumulative_logprob == pytest.approx(total, abs=1e-4)
        text = [*ids, *delta.token_ids]
        log_probs = pair.expected(text).log_softmax(-1)
        for place, record in enumerate(delta.logprobs, start=len(ids)):
            assert record.logprob == pytest.approx(
                float(log_probs[place - 1, record.token_id]), abs=1e-4
            )
            above = int((log_probs[place - 1] > log_probs[place - 1, record.token_id]).sum())
            assert record.rank == 1 + above
    scored = engine.result("a", 0).prompt_logprobs
    assert scored is not None and [record.token_id for record in scored] == ids[1:]
    assert engine.result("a", 1).prompt_logprobs is None


def test_bad_words_that_leave_too_few_texts_are_named(pair: Pair) -> None:
    allowed = (5, 6, 7)
    engine = ModelEngine(pair.ours)
    options = {"allowed_token_ids": allowed, "ignore_eos": True, "max_tokens": 1}
    engine.add(
        "a",
        prompt(6, 1),
        n=3,
        use_beam_search=True,
        bad_words_token_ids=((5,), (6,)),
        **options,
    )
    engine.run()
    assert engine.result("a", 0).token_ids == (7,)
    for index in (1, 2):
        (delta,) = engine.deltas["a", index]
        assert delta.finish_reason is FinishReason.ERROR
        assert isinstance(delta.refusal, InvalidRequestError)
        assert delta.refusal.param == "bad_words"
        assert "only 1" in str(delta.error)
