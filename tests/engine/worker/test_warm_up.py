"""What a start measures, on a runner whose clock says what each step takes."""

import pytest
import torch

from octavo.engine.attention.metadata import KVCacheLayout
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.worker import warm_up
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import RunnerLimits
from octavo.engine.worker.warm_up import measure_prefill


class TimedRunner:
    """A step takes `fixed` seconds, and `per_token` for each of its tokens."""

    def __init__(self, fixed: float, per_token: float, max_model_len: int = 5000) -> None:
        self.limits = RunnerLimits(8, max_model_len, 100, ())
        layout = KVCacheLayout(400, 1, 16, 8, torch.float32)
        self.kv_cache = KVCache(layout, 1, torch.device("cpu"))
        self.fixed, self.per_token = fixed, per_token
        self.now = 0.0
        self.longest = 0

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self.longest = max(self.longest, plan.num_tokens)
        if plan.scheduled:
            self.now += self.fixed + self.per_token * plan.num_tokens
        return ModelOutput({})

    def synchronize(self) -> None:
        pass


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> TimedRunner:
    made = TimedRunner(fixed=2**-8, per_token=2**-14)
    monkeypatch.setattr(warm_up.time, "perf_counter", lambda: made.now)
    return made


def test_a_token_costs_less_in_a_prompt_that_hides_what_a_step_costs(runner: TimedRunner) -> None:
    # A prompt and a decode are two steps with one token more than the prompt has.
    for num_tokens in (128, 2048):
        expected = (2 * runner.fixed + (num_tokens + 1) * runner.per_token) / num_tokens
        assert measure_prefill(runner, num_tokens) == pytest.approx(expected)


def test_the_measured_prompt_is_no_longer_than_the_context(runner: TimedRunner) -> None:
    runner.limits = RunnerLimits(8, 300, 100, ())
    seconds = measure_prefill(runner, 2048)
    assert runner.longest == 299
    assert seconds == pytest.approx((2 * runner.fixed + 300 * runner.per_token) / 299)
