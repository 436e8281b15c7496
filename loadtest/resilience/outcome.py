"""What a scenario found: figures, and what was demanded of them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

Figure = int | float | str


@dataclass(frozen=True, slots=True)
class Check:
    """One demand. `only_long` is true where a short run, or one beside others, tells nothing."""

    name: str
    value: Figure
    wanted: str
    passed: bool
    only_long: bool = False


@dataclass(slots=True)
class Outcome:
    """The result of one scenario."""

    scenario: str
    figures: dict[str, Figure] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    def none(self, name: str, count: int) -> None:
        """Demand that something never happened."""
        self.checks.append(Check(name, count, "0", count == 0))

    def equal(self, name: str, value: Figure, wanted: Figure) -> None:
        """Demand an exact value."""
        self.checks.append(Check(name, value, str(wanted), value == wanted))

    def at_most(self, name: str, value: float, limit: float, only_long: bool = False) -> None:
        """Demand an upper bound."""
        self.checks.append(
            Check(name, _rounded(value), f"<= {limit:g}", value <= limit, only_long=only_long)
        )

    def at_least(self, name: str, value: float, limit: float, only_long: bool = False) -> None:
        """Demand a lower bound."""
        self.checks.append(
            Check(name, _rounded(value), f">= {limit:g}", value >= limit, only_long=only_long)
        )

    @property
    def failed(self) -> list[Check]:
        """Demands that were not met."""
        return [check for check in self.checks if not check.passed]

    def render(self) -> str:
        """Return a short table."""
        lines = [f"{self.scenario}: {'FAILED' if self.failed else 'passed'}"]
        width = max(map(len, [*self.figures, *(check.name for check in self.checks)]))
        lines += [f"  {name:{width}}  {value}" for name, value in self.figures.items()]
        for check in self.checks:
            mark = "ok" if check.passed else "NOT MET"
            lines.append(f"  {check.name:{width}}  {check.value} (wanted {check.wanted}) {mark}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Return everything for a result file."""
        return {
            "scenario": self.scenario,
            "passed": not self.failed,
            "figures": self.figures,
            "checks": [asdict(check) for check in self.checks],
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` (0 to 1) of all do not exceed; 0 without any."""
    if not values:
        return 0.0
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")
