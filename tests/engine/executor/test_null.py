"""The executor without a model."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.config.engine import EngineConfig
from octavo.config.load import LoadConfig
from octavo.config.model import ModelConfig
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import (
    Fork,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
)
from octavo.engine.executor.null import NullExecutor
from octavo.engine.loader import resolve_checkpoint
from octavo.engine.loader.checkpoint import Checkpoint

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
MakeExecutor = Callable[..., NullExecutor]


@pytest.fixture
def facts(random_llama_dir: Path) -> ModelConfig:
    checkpoint = resolve_checkpoint(LoadConfig(model=str(random_llama_dir), load_format="null"))
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.weights is None
    return checkpoint.model_config


@pytest.fixture
def make_executor(facts: ModelConfig) -> MakeExecutor:
    def make(null_step_ms: float = 0) -> NullExecutor:
        load = LoadConfig(load_format="null", null_step_ms=null_step_ms)
        return NullExecutor(EngineConfig(load=load), facts)

    return make


def sequence(seq_id: int, num_tokens: int, params: SamplingParams = GREEDY) -> NewSequence:
    """One whose prompt and output fit into two blocks of its own."""
    blocks = (2 * seq_id, 2 * seq_id + 1)
    return NewSequence(seq_id, 0, (3,) * num_tokens, num_tokens, 0, blocks, params, 0)


def step(*scheduled: ScheduledSequence, new: tuple[NewSequence, ...] = ()) -> SchedulerOutput:
    return SchedulerOutput(0, new, scheduled, (), ())


def test_tokens_never_end_a_text_and_every_choice_gets_one(
    make_executor: MakeExecutor, facts: ModelConfig
) -> None:
    executor = make_executor()
    drawn = []
    while len(drawn) < facts.vocab_size:
        new = (sequence(1, 2), sequence(3, 2))
        parent = ScheduledSequence(1, 2, 0, (), True, (Fork(2, 1),))
        unfinished = ScheduledSequence(3, 1, 0, (), False)
        output = executor.execute_model(step(parent, unfinished, new=new))
        assert output.sampled.keys() == {1, 2}
        drawn += [token_id for (token_id,) in output.sampled.values()]
        executor.execute_model(replace(step(), removed_seq_ids=(1, 3)))
    assert set(drawn) == set(range(facts.vocab_size)) - set(facts.eos_token_ids)


def test_the_cache_holds_the_longest_context(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    assert executor.num_blocks * EngineConfig().cache.block_size >= executor.max_model_len


def test_rows_are_tracked_as_for_a_model(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    decode = ScheduledSequence(1, 1, 0, (), True)
    prompt = ScheduledSequence(1, 2, 0, (), True)
    first = executor.execute_model(step(prompt, new=(sequence(1, 2),)))
    second = executor.execute_model(step(decode))
    assert first.sampled[1] != second.sampled[1]
    with pytest.raises(AssertionError, match="more tokens scheduled than are known"):
        executor.execute_model(step(ScheduledSequence(1, 2, 0, (), False)))
    with pytest.raises(KeyError):
        executor.execute_model(step(replace(decode, seq_id=2)))


def test_log_probabilities_are_never_given(make_executor: MakeExecutor) -> None:
    params = replace(GREEDY, logprobs=2, prompt_logprobs=2)
    item = ScheduledSequence(1, 5, 0, (), True)
    output = make_executor().execute_model(step(item, new=(sequence(1, 5, params),)))
    assert output.sampled.keys() == {1}
    assert not (output.logprobs or output.prompt_logprobs or output.failed)


def test_beams_go_on_and_never_end(make_executor: MakeExecutor, facts: ModelConfig) -> None:
    params = SamplingParams(max_tokens=8, use_beam_search=True, n=2, logprobs=1)
    item = ScheduledSequence(1, 5, 0, (), True)
    output = make_executor().execute_model(step(item, new=(sequence(1, 5, params),)))
    candidates = output.candidates[1]
    assert not output.sampled and len(candidates) >= 4
    assert not {item.token_id for item in candidates} & set(facts.eos_token_ids)
    assert all(item.record is None for item in candidates)


def test_steps_end_with_the_clock(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(null_step_ms=20)
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 7.013)
    monkeypatch.setattr(time, "sleep", slept.append)
    executor.execute_model(step())
    assert slept == pytest.approx([0.007])
