"""Steps with made-up sequences: to compile and allocate before serving, and to measure."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import NewSequence, ScheduledSequence, SchedulerOutput
from octavo.engine.worker.kv_cache import KVCache
from octavo.engine.worker.language_model import RunnerLimits

_PARAMS = (
    SamplingParams(max_tokens=2, temperature=0.0),
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=2, top_p=0.9, logprobs=1, repetition_penalty=1.1),
)

_MEASURED_BLOCKS = 32
_REPEATS = 3
_LONG_SECONDS = 0.2


class Runner(Protocol):
    """What is asked of a runner here."""

    limits: RunnerLimits
    kv_cache: KVCache

    def execute(self, plan: SchedulerOutput) -> ModelOutput: ...
    def synchronize(self) -> None: ...


def warm_up_variants(runner: Runner, query_lens: Iterable[int], seq_lens: Iterable[int]) -> None:
    """Runs a prompt of each of `query_lens` and decodes, and copies of blocks both ways.

    As `warm_up`; each length stands for steps that use the same kernels. Decodes that reach each of
    `seq_lens` follow.
    """
    layout = runner.kv_cache.layout
    room = layout.num_blocks * layout.block_size
    for length in query_lens:
        warm_up(runner, 1, min(length, room - 1))
    warm_up(runner, len(_PARAMS), layout.block_size)
    for length in seq_lens:
        warm_up(runner, 1, 1, context=length - 1)
    pair = ((0, 0),)
    swaps = pair if runner.kv_cache.num_host_blocks else ()
    runner.execute(SchedulerOutput(0, (), (), (), pair, swap_out=swaps, swap_in=swaps))


def warm_up(runner: Runner, num_seqs: int, num_tokens: int, context: int = 0) -> None:
    """Runs `num_seqs` sequences of `num_tokens` tokens and a decode step of each, the real path.

    With a `context` the first of them has so many tokens before, as if they were cached, and
    computes one: a decode among prompts. Shrinks all to what the runner has room for. The sequences
    differ in how they are sampled. Blocks are written from block 0 on, so no sequence may be
    running.
    """
    limits, layout = runner.limits, runner.kv_cache.layout
    longest = max(1, min(num_tokens, limits.max_model_len - 1))
    blocks_each = _blocks_for(runner, longest + 1)
    count = min(num_seqs, limits.max_num_seqs, layout.num_blocks // blocks_each)
    behind = max(0, min(context, limits.max_model_len - 2))
    lengths = [longest] * count
    if behind:
        lengths[0] = 1
    new = tuple(
        _sequence(runner, place, place * blocks_each, length, 0 if place else behind)
        for place, length in enumerate(lengths)
    )
    seq_ids = tuple(sequence.seq_id for sequence in new)
    prompts = tuple(map(_step, seq_ids, lengths))
    runner.execute(SchedulerOutput(0, new, prompts, (), ()))
    if longest < limits.max_model_len:
        decodes = tuple(_step(seq_id, 1) for seq_id in seq_ids)
        runner.execute(SchedulerOutput(0, (), decodes, (), ()))
    runner.execute(SchedulerOutput(0, (), (), seq_ids, ()))


def _sequence(
    runner: Runner, place: int, first_block: int, num_tokens: int, context: int
) -> NewSequence:
    """One with room for a decode; a long context finds the same few blocks again and again."""
    known, num_blocks = context + num_tokens, runner.kv_cache.layout.num_blocks
    blocks = range(first_block, first_block + _blocks_for(runner, known + 1))
    return NewSequence(
        seq_id=-1 - place,
        index=0,
        token_ids=(0,) * known,
        num_prompt_tokens=known,
        num_computed_tokens=context,
        block_ids=tuple(block % num_blocks for block in blocks),
        params=_PARAMS[place % len(_PARAMS)],
        seed=0,
    )


def _blocks_for(runner: Runner, num_tokens: int) -> int:
    most = min(num_tokens, runner.limits.max_model_len)
    return -(-most // runner.kv_cache.layout.block_size)


def measure_prefill(runner: Runner, num_tokens: int) -> float:
    """Seconds that a token of a prompt of `num_tokens` takes, or of the longest that fits.

    Blocks are written from block 0 on, so no sequence may be running.
    """
    num_tokens = max(1, min(num_tokens, runner.limits.max_model_len - 1))
    return _seconds(runner, lambda: warm_up(runner, 1, num_tokens)) / num_tokens


def measure_block_copy(runner: Runner) -> float:
    """Seconds that a copy of a block to or from host memory takes, which must be there.

    Blocks are written from block 0 on, so no sequence may be running.
    """
    cache = runner.kv_cache
    num_blocks = min(_MEASURED_BLOCKS, cache.layout.num_blocks, cache.num_host_blocks)
    pairs = tuple((block, block) for block in range(num_blocks))
    copies = SchedulerOutput(0, (), (), (), (), swap_out=pairs, swap_in=pairs)
    return _seconds(runner, lambda: runner.execute(copies)) / (2 * num_blocks)


def _seconds(runner: Runner, action: Callable[[], object]) -> float:
    """Seconds of `action`, the best of a few times: what disturbs only adds to them.

    What takes long is not repeated: nobody should wait for a better figure.
    """
    best, begin = float("inf"), time.perf_counter()
    for _ in range(_REPEATS):
        if time.perf_counter() - begin > _LONG_SECONDS:
            break
        runner.synchronize()
        started = time.perf_counter()
        action()
        runner.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def _step(seq_id: int, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(seq_id, num_tokens, 0, (), True)
