"""Counting the tokens of one HTTP request."""

from collections.abc import Sequence
from typing import Any

from octavo.engine.output_processor import ChoiceOutput


class UsageCounter:
    """Prompts count once each, choices are summed; running totals come with every output."""

    def __init__(self, prompt_lengths: Sequence[int]) -> None:
        self._prompt_tokens = sum(prompt_lengths)
        self._cached_tokens = [0] * len(prompt_lengths)
        self._completion_tokens: dict[tuple[int, int], int] = {}
        self._reasoning_tokens: dict[int, int] = {}

    def add(self, prompt: int, output: ChoiceOutput) -> None:
        """Take over the totals of one choice of the prompt with this number."""
        self._cached_tokens[prompt] = output.num_cached_tokens
        self._completion_tokens[prompt, output.index] = output.num_output_tokens

    def set_reasoning(self, index: int, num_tokens: int) -> None:
        """Take over how many tokens the choice with this number has reasoned."""
        self._reasoning_tokens[index] = num_tokens

    def as_dict(self) -> dict[str, Any]:
        """Return the usage object of the API."""
        completion_tokens = sum(self._completion_tokens.values())
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
            "completion_tokens_details": {"reasoning_tokens": sum(self._reasoning_tokens.values())},
        }
