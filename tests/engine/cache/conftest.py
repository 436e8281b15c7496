"""Sequences for the cache manager."""

from collections.abc import Callable
from itertools import count

import pytest

from octavo.engine.core.request import Request, Sequence
from octavo.engine.core.sampling_params import SamplingParams

MakeSequence = Callable[..., Sequence]


@pytest.fixture
def make_sequence() -> MakeSequence:
    """Builds a sequence over a prompt; seq_ids count from 0."""
    numbers = count()

    def make(token_ids: list[int], cache_salt: str | None = None) -> Sequence:
        number = next(numbers)
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(token_ids),
            params=SamplingParams(max_tokens=100),
            seed=0,
            arrival_time=0.0,
            cache_salt=cache_salt,
        )
        return Sequence(number, request, 0, token_ids)

    return make
