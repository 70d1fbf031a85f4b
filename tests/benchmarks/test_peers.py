"""The comparison with other loaders: what is counted, what the documents show of it, and one real kill."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.peers.drawing import Panel, svg
from benchmarks.peers.launch import ROOT, Plan, run
from benchmarks.peers.page import BEGIN, END, body, cell, same_steps, words
from benchmarks.peers.recorder import Life, Recorder, count, read, survived
from benchmarks.peers.scenario import BEFORE, CHANGES, SAVE_EVERY, TITLES, Layout, kill_steps
from benchmarks.peers.tools import TOOLS


def test_steps_after_the_last_checkpoint_are_no_repeats() -> None:
    first = Life(start=0, steps={1: [0, 1], 2: [2, 3], 3: [4, 5]})
    second = Life(start=2, steps={3: [4, 5], 4: [6, 7]})
    assert survived([first, second]) == {1: [0, 1], 2: [2, 3], 3: [4, 5], 4: [6, 7]}
    assert count(survived([first, second]), epochs=1, items=8) == (0, 0)


def test_what_is_repeated_and_what_is_left_out() -> None:
    steps = {1: [0, 1], 2: [2, 3], 3: [2, 3], 4: [2, 8]}
    # Of eight samples: 2 came twice too often, 3 once; 4, 5, 6 and 7 never. 8 was added later.
    assert count(steps, epochs=1, items=8) == (3 / 8 * 100, 4 / 8 * 100)
    assert count({1: [8], 2: [8]}, epochs=1, items=8)[0] == 1 / 8 * 100
    # One of two epochs left out a sample.
    assert count({1: [0, 1], 2: [1]}, epochs=2, items=2) == (0, 50)


def test_the_record_is_there_after_a_kill(tmp_path: Path) -> None:
    for rank in (0, 1):
        recorder = Recorder(tmp_path, 1, rank)
        recorder.began(7)
        recorder.trained(8, [10 + rank])
        recorder.trained(9, [] if rank else [20])
    assert read(tmp_path, 1) == Life(start=7, steps={8: [10, 11], 9: [20]})
    assert read(tmp_path, 2) is None


def test_no_tool_has_to_pad_an_epoch() -> None:
    for layout in CHANGES.values():
        assert BEFORE.items % layout.global_batch == layout.items % layout.global_batch == 0
    steps = BEFORE.items // BEFORE.global_batch
    assert all(steps + SAVE_EVERY <= step < 2 * steps for step in kill_steps(100))
    assert TITLES.keys() == CHANGES.keys()


def test_cells() -> None:
    complete = {"repeated": 0.0, "never": 0.0}
    lost = {"repeated": 30.0, "never": 0.5}
    refused, failed = {"error": "no", "refused": True}, {"error": "oh", "refused": False}
    assert cell([complete, complete]) == "**0 / 0**"
    assert cell([complete, lost]) == "15 % / <1 %"
    assert cell([refused, refused]) == "refused" and cell([failed, refused]) == "error"
    assert cell([complete, failed]) == "**0 / 0**; error, 1 of 2 times"
    assert cell([{"error": "hangs", "refused": False}]) == "hangs"


def test_steps_are_counted_apart_from_samples() -> None:
    complete = {"repeated": 0.0, "never": 0.0, "same_steps": True}
    reordered, resized = {**complete, "same_steps": False}, {**complete, "same_steps": None}
    lost = {"repeated": 30.0, "never": 0.0, "same_steps": False}
    changes = {"nothing": [complete, complete, reordered], "batch size": [resized], "ranks": [lost, {"error": "oh"}]}
    assert "in 2 of the 3 resumes" in same_steps({"one": {"changes": changes}})


def test_the_documents_show_the_results_that_there_are() -> None:
    results = json.loads((ROOT / "docs" / "peers.json").read_text())
    assert list(results) == [name for name in TOOLS if name in results]
    for name, text in (("README.md", body(results)), ("docs/peers.md", f"{body(results)}\n\n{words(results)}")):
        shown = (ROOT / name).read_text().partition(BEGIN)[2].partition(END)[0]
        assert shown.strip() == text, "run: python -m benchmarks.peers --tables-only"
    for some in results["megaresume"]["changes"].values():
        assert [(one["repeated"], one["never"]) for one in some] == [(0, 0)] * 3
    assert all(result["undisturbed"] == {"repeated": 0, "never": 0} for result in results.values())


def test_the_picture_is_drawn_and_says_what_it_shows() -> None:
    bad = Panel(title="theirs", times=[1, 2, 0, 1], lives=[0, 0, 0, 1], repeated=25, never=25)
    good = Panel(title="ours", times=[1] * 4, lives=[0, 0, 1, 1], repeated=0, never=0)
    tree = ET.fromstring(svg([bad, good], ranks=[4, 2, 4, 2]))
    text = " ".join(tree.itertext())
    assert "25 % of the samples trained again, 25 % never" in text and "every sample trained exactly once" in text
    squares = {
        path.get("class"): path.get("d", "").count("M") for path in tree.iter("{http://www.w3.org/2000/svg}path")
    }
    assert squares["repeated"] == squares["never"] == 1
    committed = (ROOT / "docs" / "killed-three-times.svg").read_text()
    assert "prefers-color-scheme: dark" in committed and 'class="card"' in committed
    ET.fromstring(committed)


@pytest.mark.process
def test_a_real_kill_and_a_resume_on_other_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    lost = {}
    for name in ("torchdata", "megaresume"):
        for life, (ranks, kill_after) in enumerate(((2, 23), (1, None)), start=1):
            layout = Layout(ranks=ranks, batch_size=8 // ranks, items=320)
            plan = Plan(
                tool=name,
                layout=layout,
                directory=tmp_path / name,
                data=tmp_path,
                life=life,
                epochs=1,
                kill_after=kill_after,
            )
            assert run(sys.executable, plan) is None
        lives = [read(tmp_path / name / "records", life) for life in (1, 2)]
        assert lives[0] is not None and lives[1] is not None and lives[1].start == 21
        assert max(lives[0].steps) >= 23
        lost[name] = count(survived([life for life in lives if life is not None]), epochs=1, items=320)
    assert lost["megaresume"] == (0, 0)
    # Rank 0 had read half of the 168 samples that were trained, and begins there alone.
    assert lost["torchdata"] == (84 / 320 * 100, 0)
