"""Sizes with which a request could wait for ever stop the start."""

import pytest

from octavo.engine.core.errors import ConfigurationError
from octavo.engine.core.limits import EngineLimits


def limits(max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> EngineLimits:
    return EngineLimits(max_model_len, max_num_seqs, max_num_batched_tokens, 4, 16, 100)


def test_f01_a_context_beyond_the_pool_is_refused_with_one_that_fits() -> None:
    limits(64, 1, 1)
    with pytest.raises(ConfigurationError, match="--max-model-len 64"):
        limits(65, 1, 1)


def test_a_step_must_hold_one_token_of_each_sequence() -> None:
    with pytest.raises(ConfigurationError, match="--max-num-batched-tokens 9"):
        limits(64, 9, 8)
