"""The order of samples, written down: it must never change without saying so.

A red test here means that everyone's data order changes, and that no state taken before can go on. Such a change
is *Order-breaking*: it needs an entry under that heading in CHANGELOG.md and, unless nothing was released yet, a new
state version (see `megaresume.stream.state.VERSION`). Only then write the files anew and read the difference:

    python -m pytest tests/stream/test_golden.py --regenerate && git diff tests/stream/golden

The states in states/ are never written anew while their version is supported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaresume.stream.config import StreamConfig
from megaresume.stream.data_yaml import MODES
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from tests.stream.reference import reference_digests, reference_samples

HERE = Path(__file__).parent
StreamOf = Callable[..., Stream]

#: Samples written down, and samples under the digest.
NUM_SAMPLES, NUM_DIGEST = 24, 400

WEB = [512, 80, 7, 0, 1203, 64, 256, 90, 33, 410, 5, 777, 128, 61, 300, 2]
CODE = [2000, 15, 512, 640, 1, 99]
PAIRS = [200] * 5

CASES: dict[str, dict[str, Any]] = {
    "best_fit": {
        "packing": {"mode": "best_fit", "open_bins": 4, "max_age": 64, "align": 8},
        "sources": {"web": {"weight": 0.6}, "code": {"weight": 0.3}, "pairs": {"weight": 0.1}},
    },
    "split": {
        "packing": "split",
        "sources": {"web": {"weight": 0.6}, "code": {"weight": 0.3}, "pairs": {"weight": 0.1}},
    },
    "none": {
        "packing": "none",
        "blend": {"unit": "documents"},
        "sources": {"web": {"weight": 5}, "code": {"weight": 3}, "pairs": {"weight": 2}},
    },
    "knapsack": {
        "packing": {"mode": "knapsack", "lookahead": 6, "max_age": 8, "align": 8},
        "sources": {
            "web": {"weight": 0.6, "shuffle": {"block": 4, "window": 2}},
            "code": {"weight": 0.3},
            "pairs": {"weight": 0.1},
        },
    },
    "filled": {
        "packing": {"mode": "best_fit", "open_bins": 4, "max_age": 64, "align": 8},
        "sources": {"web": {"weight": 0.4, "packing": "split"}, "code": {"weight": 0.3}, "pairs": {"weight": 0.3}},
    },
    "ending": {
        "packing": {"mode": "best_fit", "open_bins": 2},
        "sources": {
            "web": {"weight": 1, "max_epochs": 4},
            "code": {"weight": 2, "max_epochs": 1},
            "pairs": {"weight": 1, "max_epochs": 3, "on_exhausted": "drop"},
        },
    },
    "staged": {
        "packing": {"mode": "best_fit", "open_bins": 4},
        "sources": {"web": {"weight": 0.6}, "code": {"weight": 0.4}, "pairs": {"weight": 0}},
        "stages": [
            {"from_samples": 6, "weights": {"web": 1, "code": 1, "pairs": 2}},
            {"from_tokens": 5000, "seq_length": 128},
            {"from_tokens": 6000, "packing": "split"},
        ],
    },
    "large": {  # as many documents as a large corpus: six rounds, not twenty-four
        "packing": "none",
        "blend": {"unit": "documents"},
        "sources": {"web": {"weight": 2}, "code": {"weight": 1}},
    },
}


def _case(name: str) -> tuple[dict[str, Any], dict[str, list[int]]]:
    lengths = {"web": WEB, "code": CODE, "pairs": PAIRS}
    if name == "large":
        lengths = {"web": [1 + i % 500 for i in range(100_003)], "code": [7] * 65_536}
    return {"seed": 1234, "seq_length": 512} | CASES[name], lengths


def _record(stream: Stream, data: dict[str, Any]) -> dict[str, Any]:
    """What is written down; [source, epoch, document, offset, length] a segment."""
    stop = NUM_DIGEST if "max_epochs" not in str(data) else 40
    return {
        "config": stream.config.to_dict(),
        "samples": [
            [[s.source, s.epoch, s.document, s.offset, s.length] for s in sample]
            for sample in stream.plan(0, NUM_SAMPLES)
        ],
        f"digest after {stop} samples": stream.digest_at(stop),
    }


def _lines(record: dict[str, Any]) -> str:
    """One sample a line, for readable differences."""
    samples = ",\n    ".join(json.dumps(s) for s in record["samples"])
    rest = {k: v for k, v in record.items() if k != "samples"}
    return json.dumps(rest, indent=2)[:-2] + f',\n  "samples": [\n    {samples}\n  ]\n}}\n'


def test_every_mode_has_a_case() -> None:
    modes = {StreamConfig.from_dict(_case(name)[0]).packing.mode for name in CASES}
    assert sorted(modes) == sorted(MODES)


@pytest.mark.parametrize("name", CASES)
def test_order(stream_of: StreamOf, name: str, request: pytest.FixtureRequest) -> None:
    data, lengths = _case(name)
    path = HERE / "golden" / f"{name}.json"
    found = _record(stream_of(data, lengths), data)
    if request.config.getoption("--regenerate"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(_lines(found))
    assert path.exists(), f"a new case: --regenerate -k '{name}' writes its file"
    assert found == json.loads(path.read_text()), "the order of samples changed: read the docstring of this file"


@pytest.mark.parametrize("name", CASES)
def test_order_of_the_reference(name: str) -> None:
    """The files are right for two programs that share no code."""
    data, lengths = _case(name)
    golden = json.loads((HERE / "golden" / f"{name}.json").read_text())
    config = StreamConfig.from_dict(data)
    stop = next(int(k.split()[2]) for k in golden if k.startswith("digest"))
    samples = list(reference_samples(config, lengths, stop))
    names = [s.name for s in config.sources]
    assert [[[s.source, s.document, s.offset, s.length] for s in sample] for sample in samples[:NUM_SAMPLES]] == [
        [[source, *rest] for source, _, *rest in sample] for sample in golden["samples"]
    ]
    assert f"{list(reference_digests(samples, names))[-1]:016x}" == golden[f"digest after {stop} samples"]


@pytest.mark.parametrize("version", [1])
def test_a_state_of_every_version_goes_on(stream_of: StreamOf, version: int) -> None:
    """Every version ever written loads for ever, and continues with the very same samples."""
    stored = json.loads((HERE / "states" / f"v{version}.json").read_text())
    state = StreamState.from_json(stored["state"])
    assert json.loads(stored["state"])["version"] == version
    assert state.bins and state.pending and state.overrides[0] == "an accepted difference"
    assert state.batches == ((0, 4), (8, 2))
    stream = stream_of(stored["data"], stored["lengths"], state)
    first = state.samples
    assert [
        [[s.source, s.epoch, s.document, s.offset, s.length] for s in sample]
        for sample in stream.plan(first, first + len(stored["samples"]))
    ] == stored["samples"]
    assert stream.digest_at(first + 200) == stored["digest 200 samples later"]
    for name, cursor in json.loads(stored["state"])["sources"].items():
        found = stream.state_at(first).to_dict()["sources"][name]
        assert found == found | cursor


def test_what_the_stored_states_hold() -> None:
    """Stages declared and begun at a resume, with documents carried over that still wait; skips, a rename, faults."""
    state = StreamState.from_json(json.loads((HERE / "states" / "v1.json").read_text())["state"])
    assert [s.name for s in state.stages] == ["start", "more code", "stage 3"] and state.pending
    assert any(cursor.exhausted for cursor in state.sources.values())
    assert state.overrides[1].startswith("at sample 40: seq_length 256 -> 128")
    # The pieces of an epoch that has begun stay as they are, shorter ones come after it.
    assert [era.piece for era in state.sources["web"].eras] == [256, 128]
    # Skips that came, that came too late in part, and that are to come; lists of documents; a source renamed; faults.
    assert state.skips.ranges[0][1] <= state.reached < state.skips.ranges[-1][0] and state.reached > state.samples
    assert [record.late > 0 for record in state.skips.log] == [True, False, False]
    assert [skip.documents.source for skip in state.skips.documents] == ["code", "web"]
    assert state.config["sources"]["web"]["names"] == ["crawl"] and state.faults.total == 2
    assert sum(cursor.left_out_tokens for cursor in state.sources.values()) > 0
