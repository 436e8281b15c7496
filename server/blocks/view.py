"""The screen of `octavo blocks`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Group
from rich.text import Text

from octavo.engine.core.block_map import BlockOwner
from octavo.server.protocol.blocks import BlocksAnswer, BlockState

STYLES: Mapping[BlockOwner, str] = {
    BlockOwner.FREE: "bright_black",
    BlockOwner.CACHED: "blue",
    BlockOwner.PROMPT: "green",
    BlockOwner.OUTPUT: "yellow",
    BlockOwner.BEAM: "magenta",
}
_BARS = "▁▂▃▄▅▆▇█"
_FREE, _CACHED, _MANY = "·", "░", "+"
_MOST_OWNERS = 9


class Canvas(NamedTuple):
    """Room for the map, in characters; `height` None for as many lines as it takes."""

    width: int
    height: int | None


class _Cell(NamedTuple):
    owner: BlockOwner
    num_owners: int


def render(answer: BlocksAnswer, canvas: Canvas) -> Group:
    """Return the map, its legend and the figures under it."""
    return Group(*_map_lines(answer, canvas), Text(), _legend(answer.blocks), *_figures(answer))


def _map_lines(answer: BlocksAnswer, canvas: Canvas) -> list[Text]:
    """A line per row of cells, after the id of its first block.

    A cell is one block, or as many as it takes for all of them to fit.
    """
    blocks = answer.blocks
    margin = len(str(len(blocks))) + 1
    per_line = max(canvas.width - margin, 1)
    per_cell = 1
    if canvas.height is not None:
        per_cell = max(-(-len(blocks) // (per_line * max(canvas.height, 1))), 1)
    lines = []
    for first in range(0, len(blocks), per_line * per_cell):
        line = Text(f"{first:>{margin - 1}} ", no_wrap=True)
        line.stylize("dim")
        for start in range(first, min(first + per_line * per_cell, len(blocks)), per_cell):
            line.append(*_cell(blocks[start : start + per_cell], answer.block_size))
        lines.append(line)
    if per_cell > 1:
        lines.append(Text(f"A cell stands for {per_cell} blocks.", style="dim"))
    return lines


def _cell(group: Sequence[BlockState], block_size: int) -> tuple[str, str]:
    """Character and style of what most blocks of the group are."""
    kinds = Counter(_Cell(block.owner, block.ref_count) for block in group)
    owner, num_owners = kinds.most_common(1)[0][0]
    style = STYLES[owner]
    if num_owners > 1:
        mark = str(num_owners) if num_owners <= _MOST_OWNERS else _MANY
        return mark, f"bold reverse {style}"
    if owner is BlockOwner.FREE:
        return _FREE, style
    if owner is BlockOwner.CACHED:
        return _CACHED, style
    alike = [block.num_filled for block in group if block.owner is owner]
    filled = sum(alike) / (len(alike) * block_size)
    return _BARS[round(filled * (len(_BARS) - 1))], style


def _legend(blocks: Sequence[BlockState]) -> Text:
    counts = Counter(block.owner for block in blocks)
    signs = {BlockOwner.FREE: _FREE, BlockOwner.CACHED: _CACHED}
    legend = Text()
    for owner, style in STYLES.items():
        legend.append(f"{signs.get(owner, _BARS[-1])} ", style)
        legend.append(f"{owner} {counts[owner]}   ")
    legend.append("2", "bold reverse")
    legend.append(f" shared {sum(block.ref_count > 1 for block in blocks)}")
    return legend


def _figures(answer: BlocksAnswer) -> list[Text]:
    num_slots = answer.num_used_blocks * answer.block_size
    saved = sum(max(block.ref_count - 1, 0) for block in answer.blocks)
    hashed = sum(block.hashed for block in answer.blocks)
    hits = answer.prefix_cache_hits / max(answer.prefix_cache_queries, 1)
    return [
        Text.assemble(
            ("waste ", "bold"),
            (f"{answer.waste:.1%}", "bold cyan"),
            f"  {answer.num_wasted_slots} of {num_slots} token slots in use hold no token",
        ),
        Text(
            f"{answer.num_used_blocks} of {answer.num_blocks} blocks of {answer.block_size} tokens "
            f"in use, {saved} more saved by sharing, {hashed} hashed, {hits:.1%} prefix hits"
        ),
    ]
