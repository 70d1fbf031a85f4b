"""The tournament of `megaresume.stream.selection` against looking at every source."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megaresume.stream.selection import NEVER, play, select, tournament

#: few different times, so that many are equal
TIMES = st.one_of(st.integers(0, 12), st.sampled_from([1 << 61, int(NEVER)]))


@given(
    sources=st.lists(st.tuples(TIMES, st.integers(0, 20)), min_size=1, max_size=40),
    steps=st.lists(st.tuples(st.integers(0, 2), TIMES, st.integers(0, 20)), max_size=60),
)
def test_the_winner_is_the_first_of_those_released_with_the_earliest_deadline(
    sources: list[tuple[int, int]], steps: list[tuple[int, int, int]]
) -> None:
    release, deadline = (np.array(column, np.int64) for column in zip(*sources, strict=True))
    now = 0
    rows = tournament(release, deadline, now)
    for units, *times in steps:
        now += units
        released = [(int(deadline[k]), k) for k in range(len(sources)) if release[k] <= now]
        place = select(rows, deadline, now)
        assert place == (min(released)[1] if released else -1)
        if place >= 0:
            release[place], deadline[place] = times
            play(rows, place, release[place], deadline[place], now)
