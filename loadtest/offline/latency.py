"""`octavo bench latency`: one batch after another through the engine, step by step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from octavo.engine.core.errors import ConfigurationError
from octavo.engine.llm_engine import LLMEngine
from octavo.kernels import ops
from octavo.loadtest.offline.ceilings import Ceilings
from octavo.loadtest.offline.engine import OfflineEngine, greedy_request
from octavo.loadtest.offline.model_work import ModelWork

_COLUMNS = """\
batch   prefill             of    first   decode            decode           of     batch
 size     tok/s  GFLOP/s  peak token ms  step ms   P99 ms    tok/s   GB/s  peak        ms"""

_NULL_COLUMNS = """\
batch    first   decode   decode    goal     batch
 size token ms  step us   P99 us      us        ms"""

# What a step without a model may take, in microseconds.
_GOAL_US, _GOAL_US_PER_SEQUENCE = 300, 3


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """What is run: prompts of `input_len` tokens, `output_len` generated for each."""

    batch_sizes: Sequence[int]
    input_len: int
    output_len: int
    num_iters: int
    num_iters_warmup: int


@dataclass(slots=True)
class BatchTimes:
    """What the steps of one batch size took, in seconds, over all iterations.

    A decode step computes one token of every sequence of the batch and nothing else; those before
    it are the prefill's. `prefill_tokens` are all tokens that these computed. `decode_contexts`
    are the tokens of the cache that each decode step saw, per sequence.
    """

    prefill_tokens: int = 0
    prefill: list[float] = field(default_factory=list)  # of an iteration
    decode: list[float] = field(default_factory=list)  # of a step
    decode_contexts: list[int] = field(default_factory=list)
    total: list[float] = field(default_factory=list)  # of an iteration


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """Figures of one batch size: medians, and the 99th percentile where the name says so.

    GFLOP/s and GB/s count what no implementation could avoid, see `model_work`.
    """

    batch_size: int
    prefill_tokens_per_s: float
    prefill_gflops: float
    first_token_ms: float
    decode_step_ms: float
    decode_step_p99_ms: float
    decode_tokens_per_s: float
    decode_gb_per_s: float
    batch_ms: float


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """All batch sizes beside what the machine can do, or, where no model runs, beside the goal."""

    title: str
    ceilings: Ceilings | None
    rows: Sequence[LatencyRow]

    def render(self) -> str:
        """The printed table."""
        if self.ceilings is None:
            lines = [_NULL_COLUMNS, *map(_null_line, self.rows)]
        else:
            of_model = [_line(row, self.ceilings) for row in self.rows]
            lines = [self.ceilings.render(), _COLUMNS, *of_model]
        return "\n".join([self.title, *lines])

    def to_json(self) -> dict[str, Any]:
        """All figures by their names; `ceilings` is None where no model runs."""
        return {
            "title": self.title,
            "ceilings": None if self.ceilings is None else asdict(self.ceilings),
            "batches": [asdict(row) for row in self.rows],
        }


def _line(row: LatencyRow, ceilings: Ceilings) -> str:
    compute = _share(row.prefill_gflops, ceilings.matmul_gflops)
    memory = _share(row.decode_gb_per_s, ceilings.bandwidth_gb)
    return (
        f"{row.batch_size:>5} {row.prefill_tokens_per_s:>9,.1f} {compute[0]:>8} "
        f"{compute[1]:>5} {row.first_token_ms:>8.1f} {row.decode_step_ms:>8.2f} "
        f"{row.decode_step_p99_ms:>8.2f} {row.decode_tokens_per_s:>8,.1f} {memory[0]:>6} "
        f"{memory[1]:>5} {row.batch_ms:>9,.1f}"
    )


def _null_line(row: LatencyRow) -> str:
    goal = _GOAL_US + _GOAL_US_PER_SEQUENCE * row.batch_size
    return (
        f"{row.batch_size:>5} {row.first_token_ms:>8.2f} {row.decode_step_ms * 1e3:>8.1f} "
        f"{row.decode_step_p99_ms * 1e3:>8.1f} {goal:>7} {row.batch_ms:>9,.1f}"
    )


def _share(value: float, ceiling: float) -> tuple[str, str]:
    return f"{value:,.1f}", f"{value / ceiling:.0%}"


def measure_latency(offline: OfflineEngine, options: LatencyOptions) -> LatencyReport:
    """Run every batch size in turn.

    Raises ConfigurationError for a batch that the engine cannot run in one step.
    """
    limits = offline.engine.limits
    if (largest := max(options.batch_sizes)) > limits.max_num_seqs:
        raise ConfigurationError(
            f"a batch of {largest} is more than the {limits.max_num_seqs} sequences of a step; "
            f"give --max-num-seqs {largest}"
        )
    ceilings = offline.ceilings() if offline.runs_model else None
    weight_itemsize = ops.INT8_WEIGHT_BYTES if offline.int8_weights else None
    work = ModelWork(offline.facts, offline.dtype.itemsize, weight_itemsize)
    # A seed of its own: every process begins with an empty cache, and no prompt comes twice.
    rng = np.random.default_rng(0)
    rows = []
    for batch_size in options.batch_sizes:
        times = BatchTimes()
        for number in range(options.num_iters_warmup + options.num_iters):
            shape = (batch_size, options.input_len)
            prompts = rng.integers(limits.vocab_size, size=shape).tolist()
            measured = times if number >= options.num_iters_warmup else BatchTimes()
            run_batch(offline.engine, prompts, options.output_len, measured)
        rows.append(summarize(times, batch_size, options.input_len, work))
    title = (
        f"{offline.describe()}: prompts of {options.input_len} tokens, "
        f"{options.output_len} generated, {options.num_iters} iterations"
    )
    return LatencyReport(title, ceilings, rows)


def run_batch(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], output_len: int, times: BatchTimes
) -> None:
    """Answer the prompts side by side and add what the steps took to `times`."""
    lengths = {str(number): len(prompt) for number, prompt in enumerate(prompts)}
    for request_id, prompt in zip(lengths, prompts, strict=True):
        engine.add_request(greedy_request(request_id, prompt, output_len))
    waiting = set(lengths)  # for their first token
    prefill = total = 0.0
    while engine.has_work():
        decoding = not waiting
        context = sum(lengths.values())
        begin = perf_counter()
        deltas = engine.step()
        took = perf_counter() - begin
        total += took
        if not decoding:
            prefill += took
            times.prefill_tokens += engine.stats().last_step_tokens
        elif len(deltas) == len(prompts):
            times.decode.append(took)
            times.decode_contexts.append(context)
        for delta in deltas:
            waiting.discard(delta.request_id)
            lengths[delta.request_id] += len(delta.token_ids)
    times.prefill.append(prefill)
    times.total.append(total)


def summarize(times: BatchTimes, batch_size: int, input_len: int, work: ModelWork) -> LatencyRow:
    """The figures of one batch size whose prompts all had `input_len` tokens."""
    operations = batch_size * work.prefill_operations(input_len) * len(times.prefill)
    steps = np.array(times.decode) if times.decode else np.array([np.nan])
    step = float(np.median(steps))
    context = int(np.mean(times.decode_contexts or [0])) // batch_size
    read = work.weight_bytes + batch_size * work.kv_bytes(context)
    return LatencyRow(
        batch_size=batch_size,
        prefill_tokens_per_s=times.prefill_tokens / sum(times.prefill),
        prefill_gflops=operations / sum(times.prefill) / 1e9,
        first_token_ms=float(np.median(times.prefill)) * 1e3,
        decode_step_ms=step * 1e3,
        decode_step_p99_ms=float(np.percentile(steps, 99)) * 1e3,
        decode_tokens_per_s=batch_size / step,
        decode_gb_per_s=read / step / 1e9,
        batch_ms=float(np.median(times.total)) * 1e3,
    )
