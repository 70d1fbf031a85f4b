"""Files of every version ever written can be read: the examples here are never changed, only added to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.manifest import read_manifest
from megaresume.checkpoint.records.marker import read_marker
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.checkpoint.system import Topology
from megaresume.stream.state import StreamState

VERSION_1 = Path(__file__).with_name("formats") / "version1"
RUN = "76120b4bb5758a9c"


def test_step_file_1(state: Callable[..., StreamState]) -> None:
    record = read_step_file(VERSION_1 / "step_0000010.json", iteration=10, tag="global_step10", run=RUN)
    assert record.state == state(80)
    assert record.topology == Topology(dp=2, num_workers=2, global_batch_size=8)


def test_manifest_1() -> None:
    manifest = read_manifest(VERSION_1 / "step_0000010.manifest.json", iteration=10, tag="global_step10")
    assert [(f.path, f.size) for f in manifest.files] == [
        ("mp_rank_00_model_states.pt", 1024),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", 1024),
    ]
    assert {f.checksum for f in manifest.files} == {"60a065edc7a12146142413063b5f7939"}


def test_ledger_1() -> None:
    reading = read_ledger(VERSION_1 / "ledger.jsonl")
    assert reading.problems == ()
    assert [(e.kind, e.iteration, e.tag, e.samples, e.run) for e in reading.entries] == [
        ("checkpoint", 10, "global_step10", 80, RUN),
        ("start", 10, "global_step10", 80, RUN),
    ]
    assert reading.entries[1].topology == Topology(
        dp=4, tp=2, nodes=1, zero_stage=1, micro_batch_size=2, global_batch_size=8
    )


def test_marker_1() -> None:
    marker = read_marker(VERSION_1 / "step_0000020.saving@best.json")
    assert marker is not None
    assert (marker.iteration, marker.tag, marker.run, marker.latest, marker.tracker) == (20, "best", RUN, True, True)
