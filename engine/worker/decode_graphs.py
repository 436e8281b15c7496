"""Decode steps recorded once and repeated: the host's work no longer grows with the layers.

A graph has a fixed number of rows, filled up with padding, and upper bounds on each context and on
all of them together, which decide how many programs the attention starts. Rows and contexts come
from short lists, so that a few graphs do for all steps; a step without a graph is carried out
kernel by kernel.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.worker.device_step import DeviceStep, Longest
from octavo.engine.worker.device_stream import DeviceStream, Work
from octavo.engine.worker.packed_step import StepInputs, StepShape, num_words, padding

MAX_GRAPH_ROWS = 512

_USUAL_TOKENS = 512 * 1024
"""Of all contexts of a step together. A graph for more would start programs for them whenever it
runs, and to read so many takes longer than to launch the step kernel by kernel."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then by 8 to 256 and by 16 to 512, but none above `max_num_seqs`; that itself too.

    Fine steps keep the padding below an eighth of what is computed.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, MAX_GRAPH_ROWS + 1, 16)]
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    return [size for size in sizes if size < most] + [most]


def tokens_of_graph(size: int, bound: int, shortest: int) -> int:
    """Tokens of all contexts together in a graph of `size` rows with contexts up to `bound`.

    All that the rows may have, where `bound` is the `shortest` of all.
    """
    return min(size * bound, max(size * shortest, _USUAL_TOKENS))


def wanted_graphs(sizes: list[int], bounds: list[int]) -> Iterator[tuple[int, int]]:
    """(rows, context) of the graphs, the largest first: the others then fit into its memory.

    Long contexts get every power of two only: a step over them takes longer than padding costs.
    """
    for size in reversed(sizes):
        for bound in reversed(bounds):
            if bound == bounds[0] or size & (size - 1) == 0 or size == sizes[-1]:
                yield size, bound


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A recorded step of `size` rows: `forward` fills `logits` [size, V], `draw` then `ids`.

    `num_tokens` is the most that the contexts may have together.
    """

    size: int
    num_tokens: int
    inputs: StepInputs
    forward: Work
    draw: Work
    logits: Tensor
    ids: Tensor


class DecodeGraphs:
    """All graphs, over one set of fixed buffers.

    `staging` int64 is where steps are uploaded.
    """

    def __init__(
        self,
        stream: DeviceStream,
        step: DeviceStep,
        sizes: list[int],
        bounds: list[int],
        vocab_size: int,
    ) -> None:
        self._sizes = sizes
        self._bounds = bounds
        device, largest = stream.device, sizes[-1]
        # Room for what a usual step holds beside the rows; larger ones are copied once more.
        words = num_words(StepShape(*[largest] * 6))
        self.staging = torch.zeros(words, dtype=torch.int64).to(device)
        logits = torch.empty((largest, vocab_size), dtype=torch.float32, device=device)
        ids = torch.zeros(largest, dtype=torch.int64).to(device)
        self._pool = stream.new_pool()
        self._graphs = {
            (size, bound): self._capture(stream, step, size, bound, (logits[:size], ids[:size]))
            for size, bound in wanted_graphs(sizes, bounds)
        }

    def __len__(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def take(self, words: Tensor) -> None:
        """Brings a step to where the graphs read it, if it had to be uploaded elsewhere."""
        if words.data_ptr() != self.staging.data_ptr():
            self.staging.copy_(words[: self.staging.shape[0]])

    def find(self, seq_lens: NDArray[np.int64]) -> DecodeGraph | None:
        """The smallest graph for decodes of sequences with `seq_lens` [S] tokens."""
        longest, num_tokens = int(seq_lens.max()), int(seq_lens.sum())
        bound = next((bound for bound in self._bounds if bound >= longest), None)
        for size in self._sizes:
            if bound is not None and size >= seq_lens.size:
                graph = self._graphs.get((size, bound))
                if graph is not None and num_tokens <= graph.num_tokens:
                    return graph
        return None

    def _capture(
        self,
        stream: DeviceStream,
        step: DeviceStep,
        size: int,
        bound: int,
        outputs: tuple[Tensor, Tensor],
    ) -> DecodeGraph:
        shape = StepShape.decode(size)
        num_tokens = tokens_of_graph(size, bound, self._bounds[0])
        inputs = StepInputs.of(self.staging, shape)
        logits, ids = outputs

        def forward() -> None:
            logits.copy_(step.forward(inputs, Longest(1, bound, num_tokens))[1])

        def draw() -> None:
            ids.copy_(step.draw(inputs, logits))

        stream.upload(padding(size, step.padding_row), self.staging)
        recorded = []
        for work in (forward, draw):
            # What compiles or sets itself up at the first call must not do so in the recording.
            stream.submit(work)
            recorded.append(stream.capture(work, self._pool))
        return DecodeGraph(size, num_tokens, inputs, recorded[0], recorded[1], logits, ids)
