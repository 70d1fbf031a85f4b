"""`Meter` and its thread, of a run that is not even a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from megaresume.checkpoint.metrics.clocks import Clocks
from megaresume.checkpoint.metrics.looker import Looker, Shared, Watched
from megaresume.checkpoint.metrics.meter import Meter
from megaresume.checkpoint.metrics.words import parse


def run_of(samples: Callable[[], int]) -> Watched:
    run = "0123456789abcdef"
    return Watched(stream=None, samples=samples, step=lambda: 2, numbers=None, root=None, run=run, attempt=1, born=0.0)


def test_a_count_that_falls_was_read_between_two_writes() -> None:
    counts = iter([24, 16, 16, 16])
    looker = Looker(Shared(parse("jsonl"), Clocks(), 0), run_of(lambda: next(counts)))
    assert looker.position() == (2, 16)
    assert next(counts, None) is None


def test_the_loggers_of_the_trainer_get_a_reading_once() -> None:
    meter = Meter(parse("trainer every=0.05"), Clocks(), 0)
    told: list[tuple[Mapping[str, float], int]] = []
    meter.give(lambda figures, step: told.append((figures, step)))
    assert told == []  # before the first reading
    meter.begin(run_of(lambda: 16))
    meter.start()
    deadline = time.monotonic() + 60
    while meter.pending is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    meter.close()
    reading = meter.pending
    assert reading is not None and reading is meter.latest
    for _ in range(2):
        meter.give(lambda figures, step: told.append((figures, step)))
    assert told == [(reading.flat(), 2)]
    assert told[0][0]["megaresume/samples"] == 16
    assert meter.pending is None
