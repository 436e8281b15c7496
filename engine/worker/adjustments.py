"""What a request changes in its logits before a token is chosen: bias, penalties, masks."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.worker.host_copies import to_device

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """The adjustments of one sequence; ids outside the vocabulary have been dropped.

    bias_ids, bias      int64 [B], float32 [B]
    allowed_ids         int64 [A], or None when all ids are allowed
    bad_words           token sequences that must not be produced
    end_ids             int64 [E], masked while fewer than `min_tokens` tokens are generated
    """

    bias_ids: Tensor
    bias: Tensor
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    allowed_ids: Tensor | None
    bad_words: tuple[tuple[int, ...], ...]
    end_ids: Tensor
    min_tokens: int

    def applies(self, num_output_tokens: int) -> bool:
        """Whether anything changes after so many generated tokens."""
        return self.masks(num_output_tokens) or bool(
            self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty
        )

    def masks(self, num_output_tokens: int) -> bool:
        """Whether anything but penalties changes something after so many generated tokens."""
        return num_output_tokens < self.min_tokens or bool(
            self.bias_ids.numel() or self.allowed_ids is not None or self.bad_words
        )

    def apply(self, logits: Tensor, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
        """Changes `logits` [V] in place: bias, penalties, masks, in this order."""
        self.add_bias(logits)
        if self.repetition_penalty != 1.0:
            self._penalize_repetition(logits, np.concatenate((prompt, output)))
        if self.frequency_penalty or self.presence_penalty:
            self._penalize_output(logits, output)
        self.mask(logits, output)

    def add_bias(self, logits: Tensor) -> None:
        """The bias, in place."""
        logits[self.bias_ids] += self.bias

    def mask(self, logits: Tensor, output: NDArray[np.int32]) -> None:
        """The masks, in place; without bad words only the length of `output` matters."""
        if self.allowed_ids is not None:
            kept = logits[self.allowed_ids]
            logits.fill_(-torch.inf)
            logits[self.allowed_ids] = kept
        banned = [word[-1] for word in self.bad_words if _completes(word, output)]
        if banned:
            logits[to_device(torch.tensor(banned), logits.device)] = -torch.inf
        if output.size < self.min_tokens:
            logits[self.end_ids] = -torch.inf

    def _penalize_repetition(self, logits: Tensor, token_ids: NDArray[np.int32]) -> None:
        # An id that occurs often is written often, each time with the same value.
        ids = torch.from_numpy(token_ids).to(logits.device, torch.int64)
        before = logits[ids]
        penalty = self.repetition_penalty
        after = torch.where(before > 0, before.double() / penalty, before.double() * penalty)
        logits[ids] = after.clamp_(max=_LARGEST).float()

    def _penalize_output(self, logits: Tensor, output: NDArray[np.int32]) -> None:
        token_ids, counts = np.unique(output, return_counts=True)
        penalty = self.frequency_penalty * counts + self.presence_penalty
        ids = torch.from_numpy(token_ids).to(logits.device, torch.int64)
        logits[ids] -= torch.from_numpy(penalty).to(logits.device, logits.dtype)


def make_adjustments(
    params: SamplingParams, eos_token_ids: Iterable[int], vocab_size: int, device: torch.device
) -> LogitAdjustments | None:
    """The adjustments that `params` ask for, or None when there are none."""

    def inside(ids: Iterable[int]) -> list[int]:
        return sorted({token_id for token_id in ids if 0 <= token_id < vocab_size})

    def known(ids: Iterable[int]) -> Tensor:
        return to_device(torch.tensor(inside(ids), dtype=torch.int64), device)

    bias = [params.logit_bias[token_id] for token_id in inside(params.logit_bias)]
    bad_words = tuple(
        word
        for word in params.bad_words_token_ids
        if word and all(0 <= token_id < vocab_size for token_id in word)
    )
    masks = params.min_tokens > 0 or params.allowed_token_ids is not None or bad_words
    penalties = (params.repetition_penalty - 1.0, params.frequency_penalty, params.presence_penalty)
    if not (bias or masks or any(penalties)):
        return None
    return LogitAdjustments(
        bias_ids=known(params.logit_bias),
        bias=to_device(torch.tensor(bias, dtype=torch.float32), device),
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        allowed_ids=None if params.allowed_token_ids is None else known(params.allowed_token_ids),
        bad_words=bad_words,
        end_ids=known((*eos_token_ids, *params.stop_token_ids)),
        min_tokens=params.min_tokens,
    )


def _completes(word: tuple[int, ...], output: NDArray[np.int32]) -> bool:
    """Whether the last id of `word` would complete it."""
    head = len(word) - 1
    return head <= output.size and output[output.size - head :].tolist() == list(word[:-1])
