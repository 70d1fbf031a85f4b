"""64-bit mixing: the one hash primitive of the order of samples.

``mix`` is the output function of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014). It is a bijection on 64 bits, the same on every machine, and costs two multiplications.
"""

from __future__ import annotations

import numba
import numpy as np

from megaresume.stream.compiled import compiled

#: 2**64 / golden ratio, made odd: the increment of splitmix64.
GOLDEN = 0x9E3779B97F4A7C15

_GOLDEN = np.uint64(GOLDEN)
_C1 = np.uint64(0xBF58476D1CE4E5B9)
_C2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@compiled(numba.uint64(numba.uint64), inline="always")
def mix(x: np.uint64) -> np.uint64:
    """One splitmix64 step, uint64 to uint64."""
    x = x + _GOLDEN
    x = (x ^ (x >> _S30)) * _C1
    x = (x ^ (x >> _S27)) * _C2
    return x ^ (x >> _S31)
