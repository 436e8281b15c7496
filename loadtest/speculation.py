"""Speculative decoding during a run, from the counters of the server's metrics page."""

import re
from dataclasses import dataclass
from typing import Self

# Any prefix: other servers count under the same names. Rows of several engines are summed.
_COUNTER = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{[^}]*\})? (\S+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Drafts made, tokens in them, and how many of those were accepted."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def from_metrics(cls, page: str) -> Self:
        """Totals on a page in Prometheus text format; zero where a counter is missing."""
        totals = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
        for name, number in _COUNTER.findall(page):
            totals[name] += int(float(number))
        return cls(**totals)

    def since(self, before: Self) -> Self | None:
        """What was added since `before`; None when there was no draft."""
        if self.drafts <= before.drafts:
            return None
        return type(self)(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the draft tokens, in percent."""
        return 100 * self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens that a step gives: the accepted ones and the step's own."""
        return 1 + self.accepted_tokens / self.drafts

    def to_json(self) -> dict[str, float]:
        """The figures by their names in the result file."""
        return {
            "spec_decode_acceptance_rate": self.acceptance_rate,
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted_tokens,
        }
