"""Steps with made-up sequences: to compile and allocate before serving, and to measure memory."""

from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import NewSequence, ScheduledSequence, SchedulerOutput
from octavo.engine.worker.model_runner import ModelRunner

_PARAMS = (
    SamplingParams(max_tokens=2, temperature=0.0),
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=2, top_p=0.9, logprobs=1, repetition_penalty=1.1),
)


def warm_up(runner: ModelRunner, num_seqs: int, num_tokens: int) -> None:
    """Runs `num_seqs` sequences of `num_tokens` tokens and a decode step of each, the real path.

    Shrinks both to what the runner has room for. The sequences differ in how they are sampled.
    Blocks are written from block 0 on, so no sequence may be running.
    """
    limits, layout = runner.limits, runner.layout
    longest = max(1, min(num_tokens, limits.max_model_len - 1))
    blocks_each = -(-min(longest + 1, limits.max_model_len) // layout.block_size)
    count = min(num_seqs, limits.max_num_seqs, layout.num_blocks // blocks_each)
    new = tuple(
        NewSequence(
            seq_id=-1 - place,
            index=0,
            token_ids=(0,) * longest,
            num_prompt_tokens=longest,
            num_computed_tokens=0,
            block_ids=tuple(range(place * blocks_each, (place + 1) * blocks_each)),
            params=_PARAMS[place % len(_PARAMS)],
            seed=0,
        )
        for place in range(count)
    )
    seq_ids = tuple(sequence.seq_id for sequence in new)
    runner.execute(SchedulerOutput(0, new, _steps(seq_ids, longest), (), ()))
    if longest < limits.max_model_len:
        runner.execute(SchedulerOutput(0, (), _steps(seq_ids, 1), (), ()))
    runner.execute(SchedulerOutput(0, (), (), seq_ids, ()))


def _steps(seq_ids: tuple[int, ...], num_tokens: int) -> tuple[ScheduledSequence, ...]:
    return tuple(ScheduledSequence(seq_id, num_tokens, 0, (), True) for seq_id in seq_ids)
