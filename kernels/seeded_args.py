"""Arguments of the ops that draw tokens without leaving the device."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SeededDraws:
    """What each of N draws reads; row[n] says which row of the logits.

    rows         int64 [N]
    temperature  float32 [N]   0 is greedy
    streams      int64 [N]     64 random bits that name (seed, choice, position) of the draw
    """

    rows: Tensor
    temperature: Tensor
    streams: Tensor


@dataclass(frozen=True, slots=True)
class Cutoff:
    """Which tokens of a draw's row survive its filters.

    Those whose logit is above `value`, and those equal to it with an id up to `last_id`.

    value    float32 [N]   -inf where all survive
    last_id  int32 [N]
    """

    value: Tensor
    last_id: Tensor


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Which tokens each row of logits has seen. R rows, V ids, W = ceil(V / 32).

    rows         int64 [R]      where in the tables, of any length P, each row of logits looks
    prompt_bits  int32 [P, W]   bit i of word w stands for id 32 * w + i
    outputs      int16 [P, V]   how often each id was generated
    """

    rows: Tensor
    prompt_bits: Tensor
    outputs: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """One entry per row of logits, float32 [R].

    repetition  divides positive and multiplies other logits of ids in prompt or output; 1 is off
    frequency   is subtracted once per occurrence in the output; 0 is off
    presence    is subtracted once for every id in the output; 0 is off
    """

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
