"""The buffers through which steps go to the device."""

import numpy as np
import torch
from fake_stream import FakeStream


def upload(stream: FakeStream, *words: int) -> torch.Tensor:
    return stream.upload(np.array(words, np.int64), torch.empty(0, dtype=torch.int64))


def test_three_steps_may_be_under_way_and_the_fourth_waits_for_the_first() -> None:
    stream = FakeStream()
    targets = [upload(stream, number, number) for number in range(3)]
    assert stream.num_done == 0
    targets.append(upload(stream, 3, 3))
    assert stream.num_done == 1 and targets[0].tolist() == [0, 0]
    stream.synchronize()
    assert [target.tolist() for target in targets] == [[n, n] for n in range(4)]


def test_a_buffer_grows_with_the_steps_and_not_with_each_of_them() -> None:
    stream = FakeStream()
    before = stream.num_slots
    for size in (*range(1, 40), 3):
        target = upload(stream, *range(size))
        stream.synchronize()
        assert target.tolist() == list(range(size))
    # Each of the three is doubled a few times.
    assert stream.num_slots - before <= 3 * 6
