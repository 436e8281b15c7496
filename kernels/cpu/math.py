"""Elementary functions on float32 that LLVM turns into vectors."""

import numpy as np

from octavo.kernels.cpu.compiled import inlined
from octavo.kernels.cpu.intrinsics import floor_f32, power_of_two

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts, the first short enough that its multiples are exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_HALF, _ONE, _TWO = np.float32(0.5), np.float32(1.0), np.float32(2.0)
# Taylor's series is near enough to the best polynomial for |r| <= ln 2 / 2: 1 ulp.
_C6, _C5, _C4, _C3 = (np.float32(1 / n) for n in (720, 120, 24, 6))


@inlined
def exp(x: np.float32) -> np.float32:
    """e to the power of x, within 2 ulp; x is held in -87 ... 88; NaN stays NaN."""
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    n = floor_f32(x * _LOG2_E + _HALF)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _HALF) * r * r + r + _ONE
    return np.float32(series * power_of_two(n))


@inlined
def tanh(x: np.float32) -> np.float32:
    """Hyperbolic tangent; absolute error about 1e-7."""
    return np.float32(_ONE - _TWO / (exp(_TWO * x) + _ONE))
