"""A small chart: axes with round ticks, lines, points and bars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Self

WIDTH, HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 34, 46
_NUM_COLOURS = 8
_WIDE_RATIO = 8  # from here on a logarithmic axis has ticks at 1, 2, 5 of each power of ten

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values; a logarithmic one must be above 0."""

    label: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def over(cls, label: str, values: Sequence[float], *, log: bool = False) -> Self:
        """The range of `values`, from 0 or, if logarithmic, from the smallest above 0."""
        finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        high = max(finite, default=1.0) or 1.0
        low = min(finite, default=high / 10) if log else 0.0
        return cls(label, low, high if high > low else low * 2, log)

    def place(self, value: float) -> float:
        """Where `value` is, 0 at the low end and 1 at the high end; never outside."""
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Round values within the range, some four to eight of them."""
        if self.log and self.high / self.low > _WIDE_RATIO:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if self.high / self.low <= 1000 else (1,)
            values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        else:
            step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
            step *= next(n for n in (1, 2, 5, 10) if (self.high - self.low) / (n * step) <= 8)
            values = [number * step for number in range(int(self.high / step) + 2)]
        return [value for value in values if self.low <= value <= self.high * (1 + 1e-9)]


class Chart:
    """Collects marks and renders them. Colours are numbers; the page says what they look like."""

    def __init__(self, title: str, x: Axis, y: Axis) -> None:
        self._x, self._y = x, y
        self._parts = [f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>']
        for tick in y.ticks():
            height = self._height(tick)
            self._parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{height}"'
                f' y2="{height}"/><text class="tick" x="{_LEFT - 6}" y="{height + 4}"'
                f' text-anchor="end">{format_number(tick)}</text>'
            )
        self._legend: list[str] = []

    def ticks_below(self) -> Self:
        """Draw the ticks of the x axis; left out where bars carry names instead."""
        base = HEIGHT - _BOTTOM
        for tick in self._x.ticks():
            across = self._across(tick)
            self._parts.append(
                f'<line class="grid" x1="{across}" x2="{across}" y1="{_TOP}" y2="{base}"/>'
                f'<text class="tick" x="{across}" y="{base + 16}"'
                f' text-anchor="middle">{format_number(tick)}</text>'
            )
        return self

    def line(self, points: Sequence[Point], colour: int, name: str = "") -> None:
        """Connected points; a name goes into the legend."""
        path = " ".join(f"{self._across(x)},{self._height(y)}" for x, y in points)
        self._parts.append(f'<polyline class="line c{colour % _NUM_COLOURS}" points="{path}"/>')
        if name:
            self.legend(name, colour)

    def legend(self, name: str, colour: int) -> None:
        """Say below the chart what a colour stands for."""
        self._legend.append(f'<span><i class="b{colour % _NUM_COLOURS}"></i>{escape(name)}</span>')

    def point(self, at: Point, colour: int, label: str, tooltip: str) -> None:
        """A dot; a label at its upper left, and a text that shows under the pointer."""
        across, height = self._across(at[0]), self._height(at[1])
        self._parts.append(
            f'<circle class="dot c{colour % _NUM_COLOURS}" cx="{across}" cy="{height}" r="4">'
            f"<title>{escape(tooltip)}</title></circle>"
            f'<text class="tick" x="{across - 6:.1f}" y="{height - 6:.1f}"'
            f' text-anchor="end">{escape(label)}</text>'
        )

    def bar(self, span: tuple[float, float], value: float, colour: int, tooltip: str) -> None:
        """A bar from the low end of the y axis to `value`, across `span` of the x axis.

        The value stands upright above it, so the axis should end a quarter above the highest.
        """
        left, right = self._across(span[0]), self._across(span[1])
        top, base = self._height(value), HEIGHT - _BOTTOM
        self._parts.append(
            f'<rect class="bar c{colour % _NUM_COLOURS}" x="{left}" width="{right - left:.1f}"'
            f' y="{top}" height="{base - top:.1f}"><title>{escape(tooltip)}</title></rect>'
            f'<text class="value" transform="translate({(left + right) / 2 + 4:.1f} {top - 4:.1f})'
            f' rotate(-90)">{short_number(value)}</text>'
        )

    def name_below(self, x: float, text: str, tooltip: str) -> None:
        """A short name under a place of the x axis, and the long one for the pointer."""
        self._parts.append(
            f'<text class="tick" x="{self._across(x)}" y="{HEIGHT - _BOTTOM + 16}"'
            f' text-anchor="middle">{escape(text)}<title>{escape(tooltip)}</title></text>'
        )

    def level(self, y: float) -> None:
        """A stressed line across the chart."""
        height = self._height(y)
        self._parts.append(
            f'<line class="level" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{height}" y2="{height}"/>'
        )

    def render(self) -> str:
        """The chart as HTML."""
        legend = f'<div class="legend">{"".join(self._legend)}</div>' if self._legend else ""
        return (
            f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(self._parts)}'
            f'<text class="label" x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 8}"'
            f' text-anchor="middle">{escape(self._x.label)}</text>'
            f'<text class="label" transform="translate(14 {(_TOP + HEIGHT - _BOTTOM) / 2})'
            f' rotate(-90)" text-anchor="middle">{escape(self._y.label)}</text>'
            f"</svg>{legend}</figure>"
        )

    def _across(self, value: float) -> float:
        return round(_LEFT + self._x.place(value) * (WIDTH - _LEFT - _RIGHT), 1)

    def _height(self, value: float) -> float:
        base = HEIGHT - _BOTTOM
        return round(base - self._y.place(value) * (base - _TOP), 1)


def format_number(value: float) -> str:
    """A tick's text: no more digits than it needs."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def short_number(value: float) -> str:
    """With some three digits, none behind the point from 1000 on."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def page(title: str, body: str) -> str:
    """A whole HTML file; it follows the reader's choice of light or dark."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        '</title><meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; the first cell of a row is its name. A line break in a value is kept."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = []
    for name, *cells in rows:
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f"<tr><th>{escape(name)}</th>{values}</tr>")
    return f'<div class="wide"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


_COLOURS = (
    *("#2563eb", "#d97706", "#059669", "#db2777"),
    *("#7c3aed", "#0891b2", "#65a30d", "#dc2626"),
)
_STYLE = (
    ":root{color-scheme:light dark;--ink:#1c1f24;--faint:#6b7280;--grid:#e5e7eb;--paper:#fff}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e5e7eb;--faint:#9ca3af;--grid:#2b313a;"
    "--paper:#14171c}}"
    "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);"
    "max-width:1200px;margin:2rem auto;padding:0 1rem}h1{font-size:1.4rem}h2{font-size:1.1rem}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:1rem}"
    "figure{margin:0}svg{width:100%;height:auto}.wide{overflow-x:auto;margin-bottom:1.5rem}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:.25rem .7rem;border-bottom:1px solid var(--grid);text-align:right}"
    "th:first-child{text-align:left;font-weight:600;min-width:8.5rem}td{white-space:pre}"
    ".title{font-weight:600;font-size:14px;fill:var(--ink)}.tick{font-size:11px;fill:var(--faint)}"
    ".value{font-size:10px;fill:var(--ink)}"
    ".label{font-size:12px;fill:var(--faint)}.grid{stroke:var(--grid)}"
    ".level{stroke:var(--ink);stroke-dasharray:4 3}"
    ".line{fill:none;stroke-width:2}.legend{display:flex;flex-wrap:wrap;gap:.3rem 1rem;"
    "font-size:12px;padding-left:62px}.legend i{display:inline-block;width:10px;height:10px;"
    "margin-right:.35rem}"
) + "".join(
    f".line.c{i}{{stroke:{c}}}.dot.c{i},.bar.c{i}{{fill:{c}}}.b{i}{{background:{c}}}"
    for i, c in enumerate(_COLOURS)
)
