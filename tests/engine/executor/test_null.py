"""The executor without a model."""

import time
from pathlib import Path

import pytest

from octavo.config.engine import EngineConfig
from octavo.config.load import LoadConfig
from octavo.engine.core.scheduler_output import Fork, ScheduledSequence, SchedulerOutput
from octavo.engine.executor.null import NullExecutor
from octavo.engine.loader import resolve_checkpoint
from octavo.engine.loader.checkpoint import Checkpoint


def test_tokens_never_end_a_text_and_every_choice_gets_one(random_llama_dir: Path) -> None:
    config = EngineConfig(load=LoadConfig(model=str(random_llama_dir), load_format="null"))
    checkpoint = resolve_checkpoint(config.load)
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.weights is None
    facts = checkpoint.model_config
    executor = NullExecutor(config, facts)
    item = ScheduledSequence(1, 1, 0, (), True, (Fork(2, 1),))
    unfinished = ScheduledSequence(3, 1, 0, (), False)
    drawn = set()
    for step in range(facts.vocab_size):
        output = executor.execute_model(SchedulerOutput(step, (), (item, unfinished), (), ()))
        assert output.sampled.keys() == {1, 2}
        drawn |= {token_id for (token_id,) in output.sampled.values()}
    assert drawn == set(range(facts.vocab_size)) - set(facts.eos_token_ids)
    assert executor.num_blocks * config.cache.block_size >= executor.max_model_len


def test_steps_end_with_the_clock(random_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = LoadConfig(model=str(random_llama_dir), load_format="null", null_step_ms=20)
    checkpoint = resolve_checkpoint(load)
    assert isinstance(checkpoint, Checkpoint)
    executor = NullExecutor(EngineConfig(load=load), checkpoint.model_config)
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 7.013)
    monkeypatch.setattr(time, "sleep", slept.append)
    executor.execute_model(SchedulerOutput(0, (), (), (), ()))
    assert slept == pytest.approx([0.007])
