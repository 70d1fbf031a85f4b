"""The permutation is one, for every N, and looks like chance."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from megaresume.stream.permutation import permute_range, round_keys
from tests.stream.orders import document_at, order_of, position_of
from tests.stream.reference import permute


def _is_permutation(documents: npt.NDArray[np.int64]) -> bool:
    seen = np.zeros(len(documents), bool)
    seen[documents] = True
    return bool(seen.all())


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 1), (2**64 - 1, 12345)])
def test_bijection_for_every_n_up_to_4096(seed: int, epoch: int) -> None:
    keys = round_keys(seed, "web", epoch)
    for n in range(1, 4097):
        assert _is_permutation(permute_range(0, n, n, keys)), n


@pytest.mark.parametrize("bits", range(1, 21))
def test_bijection_around_powers_of_two(bits: int) -> None:
    for n in (2**bits - 1, 2**bits, 2**bits + 1):
        for epoch in range(2):
            assert _is_permutation(permute_range(0, n, n, round_keys(3, "web", epoch))), n


@pytest.mark.parametrize("n", [10**12, 2**53 + 1, 2**31 - 1, 2**32 + 1, 2**62])
def test_sampled_inverse_of_large_sources(n: int) -> None:
    rng, order = random.Random(n), order_of(n, 11, "web")
    points = [0, 1, n - 2, n - 1, *(rng.randrange(n) for _ in range(2000))]
    found = set()
    for point in points:
        epoch = rng.randrange(5) if n < 2**60 else 0  # positions have 63 bits
        position = position_of(point, order, epoch)
        assert epoch * n <= position < (epoch + 1) * n
        assert document_at(position, order) == (epoch, point)
        found.add(document_at(point, order)[1])
    assert min(found) >= 0 and max(found) < n and len(found) == len(set(points))


def test_inverse_of_every_document() -> None:
    for n in (1, 2, 3, 17, 128, 1000):
        order = order_of(n, 5, "web")
        for document in range(n):
            assert document_at(position_of(document, order, 2), order) == (2, document)


def test_round_trip_of_every_position() -> None:
    """Of every number of documents up to some hundred, and around powers of two."""
    for n in [*range(1, 260), *(2**bits + more for bits in range(9, 13) for more in (-1, 0, 1))]:
        documents = permute_range(0, n, n, round_keys(9, "web", 3))
        order = order_of(n, 9, "web")
        assert [position_of(d, order, 3) - 3 * n for d in documents.tolist()] == list(range(n)), n


def test_a_range_from_the_middle_is_part_of_the_whole() -> None:
    keys = round_keys(1, "web", 0)
    whole = permute_range(0, 1000, 1000, keys)
    assert permute_range(333, 77, 1000, keys).tolist() == whole[333:410].tolist()


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 33, 1000, 32767, 32768, 32769, 65537, 10**6 + 3, 10**12, 2**53 + 1])
def test_kernel_equals_reference(n: int) -> None:
    for seed, name, epoch in [(0, "web", 0), (2**63, "Wörter|0", 7), (-1, "a", 10**9)]:
        keys = round_keys(seed, name, epoch)
        for start in {0, n // 3, max(n - 20, 0)}:
            num = min(n - start, 20)
            expected = [permute(start + i, n, seed, name, epoch) for i in range(num)]
            assert permute_range(start, num, n, keys).tolist() == expected


def test_orders_of_other_seeds_names_and_epochs_are_unrelated() -> None:
    # A key made by a sum would make epoch 1 of seed 7 the same as epoch 0 of seed 8; one made by joining texts,
    # seed 1 of "2|a" the same as seed 12 of "a".
    names = ("a", "b", "2a", "a1", "2|a", "|a", "a|1", "a|")
    tuples = [(s, name, e) for s in (-1, 0, 1, 7, 8, 12) for name in names for e in (0, 1, 2, 11)]
    orders = {tuple(permute_range(0, 50, 10_000, round_keys(*t)).tolist()) for t in tuples}
    assert len(orders) == len(tuples)
    n = 10_000
    shuffled = [permute_range(0, n, n, round_keys(*t)) for t in tuples[:24]]
    for i, a in enumerate(shuffled):
        for b in shuffled[:i]:
            # As many documents at the same place as chance has it: one on average, Poisson.
            assert np.count_nonzero(a == b) < 10
            assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(n)


def _correlations(order: npt.NDArray[np.int64]) -> list[float]:
    """Of an order of N documents, in units of 1 / sqrt(N - 1), what chance gives on average taken out.

    serial (next document), index and document; the same for their parities; index parity and document.
    """
    n = len(order)

    def standard(x: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        centred = x - x.mean()
        return np.asarray(centred / centred.std(), np.float64)

    index, parity = standard(np.arange(n)), standard(np.arange(n) & 1)
    document, document_parity = standard(order), standard(order & 1)
    root = np.sqrt(n - 1)
    # The sum over all pairs of a permutation's values is fixed, so neighbours correlate by -1 / (n - 1).
    return [
        float(np.mean(document * np.roll(document, 1)) * root + 1 / root),
        float(np.mean(document * index) * root),
        float(np.mean(document_parity * np.roll(document_parity, 1)) * root + 1 / root),
        float(np.mean(document_parity * parity) * root),
        float(np.mean(document * parity) * root),
    ]


#: Documents -> seeds. Odd and even widths, powers of two and not, both numbers of rounds.
SEEDS = {17: 3000, 32: 3000, 33: 3000, 100: 3000, 128: 3000, 129: 3000, 256: 2000, 500: 2000, 512: 2000, 1000: 2000}
SEEDS |= {2048: 1000, 4097: 1000, 8192: 600, 40_000: 200, 65_537: 120, 2**17: 60, 2**20: 6}


@pytest.mark.parametrize(("n", "num_seeds"), SEEDS.items())
def test_correlations_are_those_of_chance(n: int, num_seeds: int) -> None:
    """Under 3 / sqrt(N), but for the 0.3 % that chance puts above: over many seeds, that share and the spread."""
    seeds = range(num_seeds)
    z = np.array([_correlations(permute_range(0, n, n, round_keys(s, "web", s % 3))) for s in seeds])
    # Five sigmas of the estimate; the seeds are fixed, so the outcome is too.
    assert np.all(np.abs(z.mean(axis=0)) < 5 / np.sqrt(num_seeds)), z.mean(axis=0)
    spread = np.mean(z**2, axis=0)
    # Chance has a spread a little under 1 where N is small; more than 1 is what a poor network shows.
    assert np.all(spread < 1 + 5 * np.sqrt(2 / num_seeds)), spread
    expected = 0.0027 * num_seeds
    above = np.count_nonzero(np.abs(z) > 3, axis=0)
    assert np.all(above <= expected + 5 * np.sqrt(expected) + 1), above


def test_first_and_last_position_of_an_epoch() -> None:
    n, order = 10, order_of(10, 1, "web")
    assert [document_at(p, order)[0] for p in (0, n - 1, n, 2 * n - 1, 2 * n)] == [0, 0, 1, 1, 2]
    first = [document_at(p, order)[1] for p in range(n)]
    second = [document_at(p, order)[1] for p in range(n, 2 * n)]
    assert sorted(first) == sorted(second) == list(range(n)) and first != second
