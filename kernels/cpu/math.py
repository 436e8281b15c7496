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


# erf(x) = x + x * P(x^2) near zero, elsewhere 1 - e^Q(|x|): N. Juffa's minimax polynomials.
_ERF_BORDER, _ERF_ONE = np.float32(0.927734375), np.float32(4)
_P5, _P4, _P3 = np.float32(-5.96761703e-4), np.float32(4.99119423e-3), np.float32(-2.67681349e-2)
_P2, _P1, _P0 = np.float32(1.12819925e-1), np.float32(-3.76125336e-1), np.float32(1.28379166e-1)
_Q6, _Q5, _Q4 = np.float32(-1.72853470e-5), np.float32(3.83197126e-4), np.float32(-3.88396438e-3)
_Q3, _Q2, _Q1 = np.float32(2.42546219e-2), np.float32(-1.06777877e-1), np.float32(-6.34846687e-1)
_Q0 = np.float32(-1.28717512e-1)


@inlined
def erf(x: np.float32) -> np.float32:
    """The error function, within 2 ulp; NaN stays NaN."""
    t = -x if x < np.float32(0) else x
    t = _ERF_ONE if t > _ERF_ONE else t
    s = x * x
    near = (((((_P5 * s + _P4) * s + _P3) * s + _P2) * s + _P1) * s + _P0) * x + x
    power = ((((((_Q6 * t + _Q5) * t + _Q4) * t + _Q3) * t + _Q2) * t + _Q1) * t + _Q0) * t - t
    far = _ONE - exp(power)
    far = -far if x < np.float32(0) else far
    return np.float32(far if t > _ERF_BORDER else near)
