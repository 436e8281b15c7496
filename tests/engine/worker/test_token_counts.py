"""Counts of tokens on the device: 16 bits each, for the penalties."""

import torch

from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.core.scheduler_output import NewSequence
from octavo.engine.worker.batch_state import BatchState
from octavo.engine.worker.row_updates import TableChange
from octavo.engine.worker.token_counts import DeviceCounts, Entering

MOST = 32767


def entered(output: tuple[int, ...], vocab_size: int = 70) -> DeviceCounts:
    """Counts in which a sequence with prompt (1, 65) and `output` has entered row 0 of two."""
    params = SamplingParams(max_tokens=9, frequency_penalty=1.0)
    state = BatchState(2, 2 + len(output), 16, vocab_size)
    sequence = NewSequence(7, 0, (1, 65, *output), 2, 0, (), params, seed=0)
    row = state.add(sequence, None)
    counts = DeviceCounts(2, vocab_size, torch.device("cpu"))
    entering = Entering.of(state, [TableChange(row, 0, (), enters=True)])
    counts.enter(*(torch.from_numpy(field) for field in entering))
    return counts


def penalized(counts: DeviceCounts, *, repetition: float, frequency: float) -> list[float]:
    logits = torch.full((1, 70), 2.0)
    penalties = torch.tensor([[repetition], [frequency], [0.0]])
    counts.penalize(logits, torch.tensor([0]), penalties)
    return logits[0].tolist()


def test_a_sequence_enters_with_prompt_and_output_and_is_counted_on() -> None:
    counts = entered((3, 69, 3))
    counts.count(torch.tensor([0, 1]), torch.tensor([3, 5]))
    expected = [2.0] * 70
    expected[1] = expected[65] = 1.0
    expected[3], expected[69] = 1.0 - 0.5 * 3, 1.0 - 0.5
    assert penalized(counts, repetition=2.0, frequency=0.5) == expected


def test_counts_end_at_what_they_hold() -> None:
    counts = entered((3,) * (MOST - 1) + (4,) * (MOST + 2))
    for _ in range(3):
        counts.count(torch.tensor([0, 0]), torch.tensor([3, 4]))
    logits = penalized(counts, repetition=1.0, frequency=1.0)
    assert logits[2:6] == [2.0, 2.0 - MOST, 2.0 - MOST, 2.0]


def test_two_bytes_are_taken_for_each_row_and_id() -> None:
    # 1,024 rows and that of padding, 151,936 ids; a bit each for those of prompts.
    meta = DeviceCounts(1024, 151_936, torch.device("meta"))
    assert meta.num_bytes == 1025 * 151_936 * 2 + 1025 * 151_936 // 8
