"""Attention over batch x context x tile: which tiles are the best for which shapes.

On CPU the kernels run in Triton's interpreter, which shows that the sweep works and nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from octavo.kernels import triton
from octavo.kernels.triton.tiles import Tiles, forced_tiles
from octavo.loadtest.gpu.inputs import Case
from octavo.loadtest.gpu.shapes import Plan
from octavo.loadtest.gpu.speed import (
    Figure,
    bytes_figure,
    decode_bytes,
    decode_case,
    num_copies,
    operations_figure,
    prefill_case,
    prefill_operations,
    seconds_of,
)
from octavo.loadtest.offline.ceilings import Ceilings


@dataclass(frozen=True, slots=True)
class Swept:
    """One shape: what each of the tiles reached; None for those that the device cannot hold."""

    name: str
    figures: dict[Tiles, Figure | None]

    @property
    def best(self) -> tuple[Tiles, Figure] | None:
        """The fastest."""
        held = [(tiles, figure) for tiles, figure in self.figures.items() if figure is not None]
        return min(held, key=lambda pair: pair[1].microseconds, default=None)


def sweep_tiles(plan: Plan, ceilings: Ceilings) -> Iterator[Swept]:
    """Every shape of the table."""
    itemsize = getattr(torch, plan.dtype).itemsize
    for batch in plan.swept_batches:
        for context in plan.contexts:
            name, moved = (
                f"decode {batch} x {context}",
                decode_bytes(plan, batch, context, itemsize),
            )
            cases = [decode_case(plan, batch, context) for _ in range(num_copies(plan, moved))]
            figure = partial(bytes_figure, name, moved=moved, ceilings=ceilings)
            yield Swept(name, _figures(plan, cases, plan.decode_tiles, figure))
    for length in plan.prompts:
        name, work = f"prefill {length}", prefill_operations(plan, length)
        figure = partial(operations_figure, name, work=work, ceilings=ceilings)
        cases = [prefill_case(plan, length)]
        yield Swept(name, _figures(plan, cases, plan.prefill_tiles, figure))


def _figures(
    plan: Plan,
    cases: Sequence[Case],
    choices: Sequence[Tiles],
    figure: Callable[[float], Figure],
) -> dict[Tiles, Figure | None]:
    works = [partial(_attend, case) for case in cases]
    found: dict[Tiles, Figure | None] = {}
    for tiles in choices:
        try:
            with forced_tiles(tiles):
                found[tiles] = figure(seconds_of(plan, works))
        except OutOfResources:
            found[tiles] = None
    return found


def _attend(case: Case) -> object:
    return triton.scaled_paged_attention(case.q, case.cache, case.batch, case.scale, None, None)
