"""The tournaments of `megaresume.stream.selection` against looking at every source."""

from __future__ import annotations

import numba
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megaresume.stream.selection import NEVER, is_due, play, release_first, select_of_few, tournaments, winner

#: few different times, so that many are equal; and some too far off for a row to tell them apart.
TIMES = st.one_of(st.integers(0, 12), st.sampled_from([1 << 60, (1 << 60) + 1, 1 << 61, int(NEVER) >> 1]))


@numba.njit
def places_of(release, deadline, draws, now):  # type: ignore[no-untyped-def]
    """The place that is drawn at each time, its source then has the next release and deadline of ``draws``; and how
    often the rows knew it."""
    (rows, scale), places, known = tournaments(release, deadline, now), [], 0
    for row in range(draws.shape[0]):
        now += draws[row, 0]
        while is_due(rows, scale, now):
            release_first(rows, scale, deadline)
        place = winner(rows, scale, now)
        known += place >= 0
        place = place if place >= 0 else select_of_few(release, deadline, now)
        places.append(place)
        if place >= 0:
            release[place], deadline[place] = draws[row, 1], draws[row, 2]
            play(rows, scale, place, release[place], deadline[place], now)
    return places, known


@given(
    sources=st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=70),
    begin=st.sampled_from([0, 5, 1 << 59]),
    # Near the units drawn by then, so that many are released just now.
    draws=st.lists(st.tuples(st.sampled_from([0, 1, 2, 1 << 59]), TIMES, TIMES), min_size=1, max_size=60)
    | st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 60)), min_size=30, max_size=60),
)
def test_the_winner_is_the_first_of_those_released_with_the_earliest_deadline(
    sources: list[tuple[int, int]], begin: int, draws: list[tuple[int, int, int]]
) -> None:
    release, deadline = (np.array(column, np.int64) for column in zip(*sources, strict=True))
    places, known = places_of(release.copy(), deadline.copy(), np.array(draws, np.int64), begin)
    now = begin
    for place, (units, *times) in zip(places, draws, strict=True):
        now += units
        released = [(int(deadline[k]), k) for k in range(len(sources)) if release[k] <= now]
        assert place == (min(released)[1] if released else -1)
        if place >= 0:
            release[place], deadline[place] = times
    if max(begin, *(max(row) for row in (*sources, *draws))) < 1 << 50:
        assert known == sum(place >= 0 for place in places)
