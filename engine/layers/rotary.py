"""Rotary position embedding: the tables of cosines and sines, with all scaling variants.

The formulas are those of transformers' modeling_rope_utils, in fp32 as there, since at long
positions the rounding of the frequencies is visible in the logits.
"""

import math

import torch
from torch import Tensor

from octavo.config.model import RopeConfig
from octavo.engine.attention.metadata import AttentionMetadata


class RotaryEmbedding:
    """The rotation of every position, as fp32 rows of rotary_dim / 2 cosines, then sines.

    Dynamic NTK scaling makes the frequencies depend on the length of the sequence once it exceeds
    the original length. As in transformers with a cache, a token is rotated for the length that
    its sequence has at the end of the step that computes it, and keys already in the cache keep
    the rotation they were written with. So beyond the original length the result depends on how a
    prompt was cut into steps; a prompt computed in one step, then one token per step, gives what
    `generate` gives.

    `table` fp32 [positions, rotary_dim] holds every position, or with dynamic scaling those of
    sequences up to `dynamic_from` tokens, which is None otherwise.
    """

    def __init__(self, rope: RopeConfig, max_positions: int) -> None:
        self.rope = rope
        self.dynamic_from: int | None = None
        if rope.rope_type == "dynamic" and rope.original_max_position_embeddings is not None:
            self.dynamic_from = rope.original_max_position_embeddings
            max_positions = min(max_positions, self.dynamic_from)
        inverse_frequencies, scale = _inverse_frequencies(rope)
        angles = torch.arange(max_positions).float()[:, None] * inverse_frequencies
        self.table = _cos_sin(angles, scale)

    @property
    def gain(self) -> float:
        """How much longer a head is after the rotation: 1 unless YaRN folds a factor in."""
        return float(self.table[0, 0])

    def rows(self, positions: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """(cos_sin, index): row index[t] of `cos_sin` rotates token t of the step."""
        if self.dynamic_from is None or metadata.max_seq_len <= self.dynamic_from:
            return self.table, positions
        tokens = torch.arange(positions.shape[0], device=positions.device)
        ends = metadata.query_start_loc[1:].to(tokens.dtype)
        sequence = torch.searchsorted(ends, tokens, right=True).clamp_(max=len(ends) - 1)
        lengths = metadata.seq_lens.long().index_select(0, sequence)
        frequencies = _dynamic_frequencies(self.rope, lengths.clamp(min=self.dynamic_from))
        return _cos_sin(positions.float()[:, None] * frequencies, 1.0), tokens


def _cos_sin(angles: Tensor, scale: float) -> Tensor:
    """angles [P, R / 2] -> [P, R]."""
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def _exponents(rope: RopeConfig, device: torch.device | None = None) -> Tensor:
    return torch.arange(0, rope.rotary_dim, 2, device=device).float() / rope.rotary_dim


def _required(value: float | None) -> float:
    if value is None:
        raise ValueError("a rope key that RopeConfig guarantees is missing")
    return value


def _inverse_frequencies(rope: RopeConfig) -> tuple[Tensor, float]:
    """(inverse frequencies fp32 [R / 2], factor on cosines and sines)."""
    plain = 1.0 / (rope.theta ** _exponents(rope))
    match rope.rope_type:
        case "linear":
            return plain / _required(rope.factor), 1.0
        case "llama3":
            return _llama3_frequencies(rope, plain), 1.0
        case "yarn":
            return _yarn_frequencies(rope), _yarn_attention_factor(rope)
        case _:
            return plain, 1.0


def _dynamic_frequencies(rope: RopeConfig, lengths: Tensor) -> Tensor:
    """Inverse frequencies [T, R / 2] for sequences of `lengths` [T] >= the original length."""
    factor, size = _required(rope.factor), rope.rotary_dim
    original = _required(rope.original_max_position_embeddings)
    growth = factor * lengths / original - (factor - 1)
    base = rope.theta * growth ** (size / (size - 2))
    # Made there: a recording of the step takes no copy from the host.
    return 1.0 / (base[:, None] ** _exponents(rope, lengths.device))


def _llama3_frequencies(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    factor = _required(rope.factor)
    low, high = _required(rope.low_freq_factor), _required(rope.high_freq_factor)
    original = _required(rope.original_max_position_embeddings)
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    stretched = torch.where(wavelength > original / low, plain / factor, plain)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, stretched)


def _yarn_frequencies(rope: RopeConfig) -> Tensor:
    """Components that turn often are kept, those that turn rarely interpolated, by a ramp."""
    factor, size = _required(rope.factor), rope.rotary_dim
    original = _required(rope.original_max_position_embeddings)

    def component_with(turns: float) -> float:
        """The component that makes this many turns within the original length."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = component_with(rope.beta_fast or 32), component_with(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(size // 2).float() - low) / (high - low)).clamp(0, 1)
    powers = rope.theta ** _exponents(rope)
    kept = 1 - ramp
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Temperature on the attention, folded into cosines and sines (YaRN, arXiv 2309.00071)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = _required(rope.factor)

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
