"""`octavo bench throughput`: a data set through the engine, all requests there from the start."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from octavo.engine.tokenizer import Tokenizer
from octavo.loadtest.dataset import draw_prompts
from octavo.loadtest.offline.engine import OfflineEngine, greedy_request
from octavo.loadtest.options import DatasetOptions
from octavo.loadtest.workload import Vocabulary


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """Counts and times of one run; `num_cached_tokens` of the prompts came from the cache."""

    title: str
    num_requests: int
    num_failed: int
    duration: float
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int

    @property
    def requests_per_s(self) -> float:
        """Finished requests per second."""
        return (self.num_requests - self.num_failed) / self.duration

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.num_output_tokens / self.duration

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt tokens, cached ones included, and generated tokens per second."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.duration

    def render(self) -> str:
        """The printed lines."""
        return (
            f"{self.title}\n"
            f"{self.num_requests} requests in {self.duration:.2f} s and {self.num_steps} steps, "
            f"{self.num_failed} failed, {self.num_preemptions} preemptions\n"
            f"{self.num_prompt_tokens} prompt tokens ({self.num_cached_tokens} from the prefix "
            f"cache), {self.num_output_tokens} generated\n"
            f"Throughput: {self.requests_per_s:.2f} requests/s, "
            f"{self.total_tokens_per_s:,.1f} total tokens/s, "
            f"{self.output_tokens_per_s:,.1f} output tokens/s"
        )

    def to_json(self) -> dict[str, Any]:
        """All figures by their names."""
        return asdict(self) | {
            "requests_per_second": self.requests_per_s,
            "tokens_per_second": self.total_tokens_per_s,
            "output_tokens_per_second": self.output_tokens_per_s,
        }


def measure_throughput(
    offline: OfflineEngine, options: DatasetOptions, seed: int
) -> ThroughputReport:
    """Answer the whole data set, greedily and past end tokens.

    Raises ValueError for a file that is not of the data set's form, RequestError for a prompt that
    the engine refuses.
    """
    engine = offline.engine
    vocabulary = Vocabulary(range(engine.limits.vocab_size))
    prompts = draw_prompts(options, np.random.default_rng(seed), options["num_prompts"], vocabulary)
    contents = _token_ids(offline, [prompt.content for prompt in prompts])
    before = engine.stats()
    begin = perf_counter()
    for number, (content, prompt) in enumerate(zip(contents, prompts, strict=True)):
        engine.add_request(greedy_request(str(number), content, prompt.output_len))
    output = cached = failed = 0
    while engine.has_work():
        for delta in engine.step():
            output += len(delta.token_ids)
            if delta.finish_reason is not None:
                cached += delta.num_cached_tokens
                failed += delta.error is not None
    duration = perf_counter() - begin
    after = engine.stats()
    return ThroughputReport(
        title=f"{offline.describe()}: {options['dataset_name']}, seed {seed}",
        num_requests=len(prompts),
        num_failed=failed,
        duration=duration,
        num_steps=after.num_steps - before.num_steps,
        num_prompt_tokens=sum(map(len, contents)),
        num_cached_tokens=cached,
        num_output_tokens=output,
        num_preemptions=after.num_preemptions - before.num_preemptions,
    )


def _token_ids(
    offline: OfflineEngine, contents: Sequence[str | Sequence[int]]
) -> list[Sequence[int]]:
    """Texts as ids; before time is taken, as a server's tokenizer runs beside its engine."""
    if not any(isinstance(content, str) for content in contents):
        return [content for content in contents if not isinstance(content, str)]
    tokenizer = Tokenizer.from_directory(offline.tokenizer_dir)
    return [
        tokenizer.encode(content) if isinstance(content, str) else content for content in contents
    ]
