"""Figures as lines of text."""

from dataclasses import dataclass

_WIDTH = 62


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound that a figure is compared with."""

    bound: float
    at_most: bool
    unit: str

    def text(self, value: float) -> str:
        """The goal and whether `value` meets it."""
        met = value <= self.bound if self.at_most else value >= self.bound
        words = "at most" if self.at_most else "at least"
        return f"  (goal: {words} {self.bound:g}{self.unit}, {'met' if met else 'MISSED'})"


def line(name: str, value: float, unit: str = "", goal: Goal | None = None) -> str:
    """One figure under its name, compared with a goal if there is one."""
    number = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
    return f"{name + ': ':<{_WIDTH}}{number}{unit}{goal.text(value) if goal else ''}"


def heading(text: str) -> str:
    """The first line of a report."""
    return f"{f' {text} ':=^{_WIDTH + 12}}"
