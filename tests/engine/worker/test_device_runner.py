"""The loop for GPUs on a stand-in that works as late as it can: texts equal the plain loop's."""

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_stream import FakeDownload, FakeStream
from hf_pair import make_pair, random_ids
from model_engine import ModelEngine
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.attention.metadata import ForwardBatch
from octavo.engine.core.limits import HostMemory
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.models.decoder import CausalLM
from octavo.engine.worker import decode_graphs
from octavo.engine.worker.decode_graphs import DecodeGraphs, graph_sizes
from octavo.engine.worker.device_step import Bounds, Longest, context_bounds
from octavo.engine.worker.packed_step import StepInputs
from octavo.engine.worker.sampler import NOT_FINITE

V = 61
EOS = 7


class HistoryModel:
    """The logits after a token depend on all tokens before it, read through the block table.

    Plain tensor operations that never wait, so that it can be recorded. The id `poison` gives NaN.
    Tokens before the `window` are read too, and weigh nothing.
    """

    def __init__(self, poison: int | None = None, window: int = 200) -> None:
        self.config = SimpleNamespace(
            vocab_size=V, num_layers=1, num_kv_heads=1, head_dim=1, max_model_len=200
        )
        table = np.random.default_rng(5).normal(0, 2, (V, V + 3)).astype(np.float32)
        if poison is not None:
            table[poison] = np.nan
        self.table = torch.from_numpy(table)
        self.poison = poison
        self.window = window

    def forward(self, batch: ForwardBatch) -> Tensor:
        attention, (cache,) = batch.attention, batch.kv_caches
        size, slots = cache.key.shape[2], attention.slot_mapping
        dummy = (cache.key.shape[0] - 1) * size
        slots = torch.where(slots < 0, dummy, slots)
        cache.key.view(-1).index_copy_(0, slots, batch.input_ids.float())
        tokens = torch.arange(batch.input_ids.shape[0])
        sequence = torch.searchsorted(attention.query_start_loc[1:].long(), tokens, right=True)
        known = cache.key[attention.block_tables[sequence].long()].flatten(1)
        places = torch.arange(known.shape[1])
        end = torch.minimum(attention.seq_lens[sequence].long(), batch.positions + 1)
        weights = (places * 31 + 7) % 53 * (places > batch.positions[:, None] - self.window)
        history = torch.where(places < end[:, None], known * weights, 0).sum(-1).long() % V
        if self.poison is not None:
            history = torch.where(batch.input_ids == self.poison, self.poison, history)
        return self.table[history]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden.clone()


REQUESTS: dict[str, dict[str, object]] = {
    "greedy": {},
    "stops": {"stop_token_ids": tuple(range(0, V, 6))},
    "short": {"max_tokens": 1},
    "seeded": {"temperature": 0.9, "seed": 3},
    "filtered": {"temperature": 1.2, "seed": 4, "top_k": 5, "top_p": 0.8, "min_p": 0.01},
    "penalized": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "banned": {"bad_words_token_ids": ((3,), (4, 5)), "min_tokens": 4, "logit_bias": {9: 2.0}},
    "scored": {"logprobs": 3, "temperature": 0.7, "seed": 5},
    "choices": {"n": 3, "temperature": 1.0, "seed": 6},
    "prompt scores": {"prompt_logprobs": 2},
    "beams": {"use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 6},
}


def add_all(engine: ModelEngine, names: list[str]) -> None:
    for number, name in enumerate(names):
        prompt = [int(x) % V for x in random_ids(3 + 5 * number, seed=number)]
        options = {"max_tokens": 12, **REQUESTS[name]}
        engine.add(name, prompt, **options)
        if number % 2:
            engine.step()


def texts(engine: ModelEngine) -> dict[tuple[str, int], list[int]]:
    return {key: engine.text(*key) for key in engine.deltas}


def run(names: list[str], **options: object) -> ModelEngine:
    engine = ModelEngine(HistoryModel(), eos_token_ids=(EOS,), **options)  # type: ignore[arg-type]
    add_all(engine, names)
    engine.run()
    return engine


DETERMINISTIC = ["greedy", "stops", "short", "penalized", "banned", "prompt scores", "beams"]


@pytest.mark.parametrize("graphs", [(), (1, 2, 4, 8)], ids=["eager", "graphs"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "in turn"])
def test_texts_equal_those_of_the_plain_loop(overlap: bool, graphs: tuple[int, ...]) -> None:
    stream = FakeStream()
    engine = run(DETERMINISTIC, stream=stream, overlap=overlap, graphs=graphs)
    plain = run(DETERMINISTIC)
    assert texts(engine) == texts(plain)
    assert (stream.num_replays > 0) == bool(graphs)
    for key, deltas in plain.deltas.items():
        assert [d.finish_reason for d in deltas][-1] == engine.deltas[key][-1].finish_reason
        for ours, theirs in zip(engine.deltas[key], deltas, strict=True):
            for scored, wanted in zip(
                ours.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True
            ):
                assert scored.token_id == wanted.token_id and scored.rank == wanted.rank
                assert scored.logprob == pytest.approx(wanted.logprob, abs=1e-5)


@pytest.mark.parametrize("name", ["seeded", "filtered", "scored", "choices"])
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["eager", "graphs"])
def test_d08_seeded_draws_are_the_same_alone_and_in_company(
    name: str, graphs: tuple[int, ...]
) -> None:
    alone = ModelEngine(HistoryModel(), stream=FakeStream(), overlap=False)  # type: ignore[arg-type]
    position = list(REQUESTS).index(name)
    prompt = [int(x) % V for x in random_ids(3 + 5 * position, seed=position)]
    alone.add(name, prompt, **{"max_tokens": 12, **REQUESTS[name]})
    alone.run()
    company = ModelEngine(HistoryModel(), stream=FakeStream(), graphs=graphs, max_num_seqs=16)  # type: ignore[arg-type]
    add_all(company, [name for name in REQUESTS if name != "beams"])
    company.run()
    for key in alone.deltas:
        assert company.text(*key) == alone.text(*key)


def test_scores_of_draws_are_exact() -> None:
    engine = run(["scored"], stream=FakeStream(), graphs=(1,))
    records = [record for delta in engine.deltas["scored", 0] for record in delta.logprobs]
    assert [record.token_id for record in records] == engine.text("scored")
    table = HistoryModel().table[:, :V].double()
    exact = torch.log_softmax(table, -1)
    for record in records:
        # The row is not known here, but its values are: each must be one of the table's.
        distance = (exact[:, record.token_id] - record.logprob).abs().min()
        assert distance < 1e-5 and len(record.top) == 3
        assert [value for _, value in record.top] == sorted(
            (value for _, value in record.top), reverse=True
        )


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_f02_texts_survive_preemption(mode: str) -> None:
    names = ["greedy", "stops", "penalized", "banned"]
    small: dict[str, object] = {
        "num_blocks": 12,
        "scheduler": {"preemption_mode": mode},
        "host_memory": HostMemory(num_swap_blocks=40 if mode == "swap" else 0),
    }
    engine = run(names, stream=FakeStream(), graphs=(1, 2, 4, 8), **small)
    assert engine.engine.stats().num_preemptions > 0
    assert texts(engine) == texts(run(names))


def test_an_abort_frees_the_row_for_the_next_sequence() -> None:
    stream = FakeStream()
    engine = ModelEngine(HistoryModel(), stream=stream, graphs=(1, 2), max_num_seqs=2)  # type: ignore[arg-type]
    engine.add("a", [1, 2, 3], max_tokens=50)
    engine.add("b", [4, 5], max_tokens=50)
    for _ in range(4):
        engine.step()
    engine.engine.abort("a")
    engine.add("c", [9, 8, 7, 6], max_tokens=9)
    engine.run()
    plain = ModelEngine(HistoryModel())  # type: ignore[arg-type]
    plain.add("b", [4, 5], max_tokens=50)
    plain.add("c", [9, 8, 7, 6], max_tokens=9)
    plain.run()
    assert (engine.text("b"), engine.text("c")) == (plain.text("b"), plain.text("c"))


def test_a_recorded_step_may_bring_a_long_block_table() -> None:
    prompt = [int(x) % V for x in random_ids(41, seed=1)]
    stream = FakeStream()
    engine = ModelEngine(HistoryModel(), stream=stream, graphs=(1,))  # type: ignore[arg-type]
    engine.add("a", prompt, max_tokens=3)
    engine.run()
    before = stream.num_replays
    engine.add("b", prompt, max_tokens=3)  # all but the last token comes from the cache
    engine.run()
    assert stream.num_replays == before + 6  # a forward pass and a draw for each of 3 tokens
    assert engine.text("b") == engine.text("a")


def test_nan_fails_its_own_row_alone_and_once() -> None:
    poison = 11
    engines = [
        ModelEngine(HistoryModel(poison), **options)  # type: ignore[arg-type]
        for options in ({}, {"stream": FakeStream(), "graphs": (1, 2, 4)})
    ]
    for engine in engines:
        engine.add("a", [1, 2, poison], max_tokens=9)
        engine.add("b", [4, 5], max_tokens=9)
        engine.run()
        assert engine.deltas["a", 0][-1].error == NOT_FINITE
    assert texts(engines[0]) == texts(engines[1])


@pytest.mark.parametrize("graphs", [(), (1, 2, 4)], ids=["eager", "graphs"])
def test_blocks_that_the_window_has_left_may_hold_nan_by_now(graphs: tuple[int, ...]) -> None:
    # Freed blocks go to other sequences, and one of these may have failed with NaN.
    model = HistoryModel(window=9)
    engines = [
        ModelEngine(model, stream=FakeStream(), graphs=graphs, window=9, max_num_batched_tokens=16),  # type: ignore[arg-type]
        ModelEngine(model),  # type: ignore[arg-type]
    ]
    for engine in engines:
        for length in (3, 30, 41):
            prompt = [int(x) % V for x in random_ids(length, seed=length)]
            engine.add(str(length), prompt, max_tokens=30)
    while engines[0].engine.has_work():
        engines[0].step()
        blocks = engines[0].engine.block_map().blocks
        left = [number for number, block in enumerate(blocks) if not block.ref_count]
        for layer in engines[0].executor.kv_cache.layers:
            layer.key[left] = torch.nan
    engines[1].run()
    assert texts(engines[0]) == texts(engines[1])


class FailedDownload(FakeDownload):
    def wait(self) -> list[NDArray[Any]]:
        raise MemoryError("no memory for a step")


class FailingStream(FakeStream):
    """Results of steps that are launched while it `fails` never come."""

    fails = False

    def download(self, sources: Callable[[], Sequence[Tensor]]) -> FakeDownload:
        result = super().download(sources)
        return FailedDownload(self) if self.fails else result


@pytest.mark.parametrize("name", ["greedy", "penalized"])
def test_f08_a_step_that_failed_is_not_waited_for_again(name: str) -> None:
    stream = FailingStream()
    engine = ModelEngine(HistoryModel(), stream=stream)  # type: ignore[arg-type]
    engine.add("a", [1, 2, 3], max_tokens=9, **REQUESTS[name])
    engine.step()
    stream.fails = True
    with pytest.raises(MemoryError):
        engine.run()
    stream.fails = False
    plain = ModelEngine(HistoryModel())  # type: ignore[arg-type]
    for each in (engine, plain):
        each.add("b", [4, 5], max_tokens=9, **REQUESTS["penalized"])
        each.run()
    assert engine.text("b") == plain.text("b")


@pytest.mark.parametrize("name", ["penalized", "banned", "masked"])
def test_only_bad_words_wait_for_the_ids_before(name: str) -> None:
    stream = FakeStream()
    options = {"allowed_token_ids": tuple(range(30)), "repetition_penalty": 1.3}
    engine = ModelEngine(HistoryModel(), stream=stream)  # type: ignore[arg-type]
    engine.add("a", [1, 2, 3], max_tokens=9, **(REQUESTS | {"masked": options})[name])
    waits = []
    launch = engine.executor.runner.launch

    def watched(plan: SchedulerOutput) -> Callable[[], ModelOutput]:
        before = stream.num_done
        result = launch(plan)
        waits.append(stream.num_done > before)
        return result

    engine.executor.runner.launch = watched  # type: ignore[method-assign]
    engine.run()
    assert any(waits) == (name == "banned")


def test_penalties_of_a_row_are_not_those_of_the_one_before() -> None:
    # One row: each sequence takes that of the one before, whose wasted step may still be running.
    names = ["penalized", "greedy", "stops", "penalized"]
    options = {"max_num_seqs": 1, "graphs": (1,), "stream": FakeStream()}
    engines = [
        ModelEngine(HistoryModel(), eos_token_ids=(EOS,), **chosen)  # type: ignore[arg-type]
        for chosen in (options, {})
    ]
    for engine in engines:
        for number, name in enumerate(names):
            prompt = [int(x) % V for x in random_ids(9, seed=number)]
            engine.add(f"{name} {number}", prompt, max_tokens=12, **REQUESTS[name])
        engine.run()
    assert texts(engines[0]) == texts(engines[1])


def test_f02_draws_and_penalties_survive_preemption_of_a_seeded_choice() -> None:
    options = {"n": 2, "temperature": 0.9, "seed": 11, "frequency_penalty": 0.7, "max_tokens": 14}
    engines = [
        ModelEngine(HistoryModel(), stream=FakeStream(), graphs=(1, 2, 4), num_blocks=number)  # type: ignore[arg-type]
        for number in (64, 12)
    ]
    for engine in engines:
        for name in "abc":
            engine.add(name, [1, 2, 3, ord(name) % V], **options)
        engine.run()
    roomy, small = engines
    assert small.engine.stats().num_preemptions > 0 == roomy.engine.stats().num_preemptions
    assert texts(small) == texts(roomy)


def test_a_step_makes_one_copy_to_the_device() -> None:
    stream = FakeStream()
    engine = run(["greedy", "stops", "seeded", "scored"], stream=stream)
    assert stream.num_uploads == len(engine.executor.plans)


def test_the_states_of_a_step_are_given_up_before_it_is_waited_for() -> None:
    model, stream = HistoryModel(), FakeStream()
    made: list[weakref.ref[Tensor]] = []

    def forward(batch: ForwardBatch) -> Tensor:
        hidden = HistoryModel.forward(model, batch)
        made.append(weakref.ref(hidden))
        return hidden

    model.forward = forward  # type: ignore[method-assign]
    engine = ModelEngine(model, stream=stream)  # type: ignore[arg-type]
    engine.add("a", [1, 2, 3], max_tokens=9)
    engine.step()
    stream.synchronize()
    # The second step is done, and nobody has asked for what came of it.
    assert [ref() for ref in made] == [None, None]


def test_a_real_model_gives_the_same_texts_as_transformers_greedily() -> None:
    pair = make_pair("llama")
    engine = ModelEngine(pair.ours, stream=FakeStream())
    prompts = {str(length): random_ids(length, seed=length) for length in (1, 5, 9, 30)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=12)
        engine.step()
    engine.run()
    assert isinstance(pair.ours, CausalLM)
    for name, prompt in prompts.items():
        pair.assert_greedy(prompt, engine.text(name))


def test_sizes_of_graphs_are_fine_for_few_rows_and_end_at_the_limit() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert graph_sizes(1024)[-3:] == [480, 496, 512]
    assert context_bounds(1000) == [1000]
    assert context_bounds(131072) == [2048, 8192, 32768, 131072]


def lengths(*sequences: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Query tokens and tokens in all of each, as arrays."""
    queries, tokens = np.array(sequences).T
    return queries, tokens


def test_lengths_of_steps_are_taken_to_a_few_bounds() -> None:
    bounds = Bounds(512, 5000)
    assert bounds.of(*lengths((1, 1))) == Longest(1, 2048, decode_tokens=1)
    assert bounds.of(*lengths((2, 2049))) == Longest(8, 5000, decode_tokens=0)
    mixed = lengths((1, 300), (65, 2048), (1, 40))
    assert bounds.of(*mixed) == Longest(512, 2048, decode_tokens=340)
    fixed = Bounds(512, 5000, fixed=True)
    assert fixed.of(*lengths((2, 9))) == Longest(512, 2048, decode_tokens=0)


class FixedStep:
    """Notes for how much it is recorded."""

    padding_row = 4

    def __init__(self) -> None:
        self.recorded: set[Longest] = set()

    def forward(self, inputs: StepInputs, longest: Longest) -> tuple[Tensor, Tensor]:
        self.recorded.add(longest)
        return torch.zeros(0), torch.zeros(inputs.rows.shape[0], V)

    def draw(self, inputs: StepInputs, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


def test_graphs_of_long_contexts_are_for_so_many_tokens_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_graphs, "_USUAL_TOKENS", 100)
    step = FixedStep()
    graphs = DecodeGraphs(FakeStream(), step, [1, 4], [20, 90], V)  # type: ignore[arg-type]
    # Rows that all are short always have one.
    assert step.recorded == {
        Longest(1, 20, 20), Longest(1, 90, 90), Longest(1, 20, 80), Longest(1, 90, 100)
    }  # fmt: skip

    def found(*seq_lens: int) -> tuple[int, int] | None:
        graph = graphs.find(np.array(seq_lens))
        return None if graph is None else (graph.size, graph.num_tokens)

    assert found(20, 20, 20, 20) == (4, 80)
    assert found(90) == (1, 90)
    assert found(90, 10) == (4, 100)
    assert found(90, 11) is None
    assert found(91) is None
