"""The simulation in its short form; and that it sees what it is there to see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.simulated_run
from benchmarks.simulated_cluster import NODE_RANKS, script
from benchmarks.simulated_documents import DocumentCounts, Wrong
from benchmarks.simulation import simulate
from megaresume.stream import order
from megaresume.stream.dealing import places_of

ROOT = Path(__file__).parents[2]


@pytest.mark.process
def test_the_short_form(tmp_path: Path) -> None:
    """A table of events, all kinds of them, and the proof; the same again from the same seed."""
    command = [sys.executable, "-m", "benchmarks.simulation", "--steps", "250", "--events", str(tmp_path / "events")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("nothing repeated, nothing skipped, the order that of an uninterrupted stream\n")
    table = (tmp_path / "events").read_text().splitlines()
    for words in ("TP x PP x DP", "node lost", "killed while saving", "nodes won", "ramp-up", "new stage", "skipped"):
        assert any(words in line for line in table), words
    lost = sum(attempt[1].lost for attempt in simulate(250).events)
    assert f"; {lost:,} steps lost to kills and trained again" in done.stdout


def test_the_cluster() -> None:
    attempts = [attempt for attempt, _ in zip(script(1_000_000, seed=7, num_sources=3), range(4000), strict=False)]
    layouts = [attempt.layout for attempt in attempts]
    assert sum(NODE_RANKS) == 4096 and {layout.nodes for layout in layouts} == set(range(1, 25))
    assert all(layout.tp * layout.pp * layout.dp <= layout.ranks for layout in layouts)
    assert max(layout.dp for layout in layouts) == 4096


def test_a_rank_that_is_handed_other_samples_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(sizes: list[int], *, dp_rank: int, dp_size: int) -> list[slice]:
        own = list(places_of(sizes, dp_rank=dp_rank, dp_size=dp_size))
        if dp_rank == dp_size - 1 and own[-1].start:
            own[-1] = slice(own[-1].start - 1, own[-1].stop - 1)
        return own

    monkeypatch.setattr(benchmarks.simulated_run, "places_of", off_by_one)
    with pytest.raises(Wrong, match="come next"):
        simulate(50)


def test_a_document_that_comes_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permutation that is none: no digest can tell, since an uninterrupted stream has it too."""
    right = order.items_at

    def wrong(*args: Any, **options: Any) -> np.ndarray:
        documents = np.array(right(*args, **options))
        documents[documents == 17] = 18
        return documents

    monkeypatch.setattr(order, "items_at", wrong)
    with pytest.raises(Wrong, match="document 18 came more than once in epoch 0"):
        simulate(250)


def test_pieces_of_a_document_must_fit() -> None:
    lengths = [np.array([10, 4])]

    def pieces(*cuts: tuple[int, int, int, int]) -> np.ndarray:
        return np.array([(0, position, document, offset, n) for position, document, offset, n in cuts])

    counts = DocumentCounts(lengths, ["web"], 1024)
    counts.add(pieces((0, 0, 4, 6), (0, 0, 0, 4), (1, 1, 0, 4)))
    counts.add(pieces((8, 0, 0, 10)))
    assert counts.missing == [0] and counts.documents == 2
    counts.add(pieces((10, 0, 0, 10)))  # closes epoch 1, of which nothing came
    assert counts.missing == [14]
    with pytest.raises(Wrong, match="long closed"):
        counts.add(pieces((0, 0, 0, 10)))
    overlapping = DocumentCounts(lengths, ["web"], 1024)
    overlapping.add(pieces((0, 0, 0, 5), (0, 0, 0, 5), (1, 1, 0, 4)))
    with pytest.raises(Wrong, match="do not fit"):
        overlapping.add(pieces((8, 0, 0, 10)))
