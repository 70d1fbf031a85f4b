"""splitmix64: the published outputs, and the reference's own."""

from __future__ import annotations

import random

import numpy as np

from megaresume.stream.permutation import GOLDEN, mix
from tests.stream.reference import splitmix64


def test_published_outputs() -> None:
    # The first three outputs of splitmix64 seeded with 0 (Vigna's splitmix64.c).
    state = [0, GOLDEN, 2 * GOLDEN % 2**64]
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(mix(np.uint64(x))) for x in state] == outputs
    assert [splitmix64(x) for x in state] == outputs


def test_kernel_equals_reference() -> None:
    rng = random.Random(1)
    for x in [0, 1, 2**63, 2**64 - 1, *(rng.getrandbits(64) for _ in range(2000))]:
        assert int(mix(np.uint64(x))) == splitmix64(x)
