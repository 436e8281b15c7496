"""One vector for each sequence that asked for an embedding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.engine.core.pooling import Embedding, Pooling
from octavo.engine.core.scheduler_output import NewSequence, ScheduledSequence
from octavo.engine.worker.input_batch import StepRows
from octavo.engine.worker.sampler import NOT_FINITE


class Pooler:
    """Gathers the hidden states that count, over as many steps as a prompt takes."""

    def __init__(self) -> None:
        self._poolings: dict[int, Pooling] = {}
        self._sums: dict[int, Tensor] = {}

    def add(self, sequence: NewSequence) -> None:
        """Note a sequence that may ask for an embedding; one that resumes starts anew."""
        pooling = sequence.params.pooling
        if pooling is not None:
            self._poolings[sequence.seq_id] = pooling

    def remove(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._poolings.pop(seq_id, None)
        self._sums.pop(seq_id, None)

    def __contains__(self, seq_id: object) -> bool:
        """True for a sequence that asked for an embedding."""
        return seq_id in self._poolings

    def pool(
        self, scheduled: Sequence[ScheduledSequence], step: StepRows, hidden: Tensor
    ) -> tuple[dict[int, Embedding], dict[int, str]]:
        """Take in the hidden states [T, hidden] of a step.

        Returns the embeddings of sequences whose last token it computed, and those that failed.
        """
        if not self._poolings:
            return {}, {}
        ended: list[int] = []
        for place, item in enumerate(scheduled):
            if item.seq_id in self._poolings:
                start = int(step.start[place])
                states = hidden[start : start + item.num_tokens]
                self._gather(item, int(step.first[place]), states)
                if item.sample:
                    ended.append(item.seq_id)
        if not ended:
            return {}, {}
        return finish(ended, torch.stack([self._sums.pop(seq_id) for seq_id in ended]))

    def _gather(self, item: ScheduledSequence, first: int, states: Tensor) -> None:
        pooling = self._poolings[item.seq_id]
        if pooling is Pooling.MEAN:
            # The sum has the direction of the mean.
            total = states.sum(0, dtype=torch.float32)
            before = self._sums.get(item.seq_id)
            self._sums[item.seq_id] = total if before is None else before + total
        elif pooling is Pooling.CLS and first == 0:
            self._sums[item.seq_id] = states[0].float()
        elif pooling is Pooling.LAST and item.sample:
            self._sums[item.seq_id] = states[-1].float()


def finish(seq_ids: Sequence[int], vectors: Tensor) -> tuple[dict[int, Embedding], dict[int, str]]:
    """Bring `vectors` fp32 [B, hidden] of B sequences to length 1.

    Returns the embeddings, and why the others have none.
    """
    vectors = torch.nn.functional.normalize(vectors, dim=-1).cpu()
    finite = vectors.isfinite().all(-1).tolist()
    rows = zip(seq_ids, vectors.numpy(), strict=True)
    embeddings = {seq_id: row for (seq_id, row), usable in zip(rows, finite, strict=True) if usable}
    return embeddings, {seq_id: NOT_FINITE for seq_id in seq_ids if seq_id not in embeddings}
