"""Random numbers that depend on a request and a position, never on the batch.

Counter-based: the k-th number of a stream is a hash of the stream's name and k, so it is the same
alone, in company and after a preemption, and nothing has to be stored.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(
    seeds: NDArray[np.int64], choices: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each entry; all arrays have one shape.

    A stream is named by its request's seed and the choice; `positions` counts its tokens from 0.
    """
    state = _fold(seeds, choices, positions)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def streams(
    seeds: NDArray[np.int64], choices: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """64 random bits for each entry, which name its draw; arguments as for `uniforms`."""
    return _fold(seeds, choices, positions).view(np.int64)


def _fold(
    seeds: NDArray[np.int64], choices: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """The three, one after the other: h = mix(h + golden * (value + 1)).

    mix is the finalizer of splitmix64 (Steele, Lea, Flood 2014).
    """
    state = np.zeros(seeds.shape, np.uint64)
    for part in (seeds, choices, positions):
        state = _mix(state + _GOLDEN * (part.astype(np.uint64) + np.uint64(1)))
    return state


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
