"""How models mark their reasoning, and where in it a generated text begins."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

_SWITCHES = ("enable_thinking", "thinking")
"""Template variables by which clients turn the reasoning off."""


class Phase(Enum):
    """What the next character of a text belongs to."""

    UNDECIDED = "undecided"  # reasoning, if the opening tag comes first
    REASONING = "reasoning"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around the reasoning; `always` where the model reasons without opening it."""

    opening: str
    closing: str
    always: bool = False

    def phase_after_prompt(self, prompt: str, template_kwargs: Mapping[str, Any]) -> Phase:
        """Return where a text begins that follows the whole rendered `prompt`.

        Only the end of the prompt counts: a message may speak of the tags.
        """
        end = prompt.rstrip()
        if end.endswith(self.opening):
            return Phase.REASONING
        if end.endswith(self.closing):
            return Phase.ANSWER
        switched_off = any(template_kwargs.get(name) is False for name in _SWITCHES)
        return Phase.REASONING if self.always and not switched_off else Phase.UNDECIDED

    def phase_after_message(self, text: str) -> Phase:
        """Return where a text begins that continues the assistant message `text`."""
        opened, closed = text.rfind(self.opening), text.rfind(self.closing)
        if opened == closed:  # neither is there
            return Phase.ANSWER if text.strip() else Phase.UNDECIDED
        return Phase.REASONING if opened > closed else Phase.ANSWER


FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
"""By the values of --reasoning-parser."""
