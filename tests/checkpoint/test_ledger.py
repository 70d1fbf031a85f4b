from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.records import ledger
from megaresume.checkpoint.records.branches import abandoned_checkpoints, branches_of, saves_given_up, saves_of_present
from megaresume.checkpoint.records.ledger import LedgerEntry, append_ledger, read_ledger, read_run
from megaresume.checkpoint.records.names import ledger_path
from megaresume.checkpoint.records.sealed import seal, unseal
from megaresume.checkpoint.system import Topology
from megaresume.stream.errors import NewerFormatError, StateError


def entry(iteration: int, kind: str = "checkpoint", tag: str | None = "usual") -> LedgerEntry:
    return LedgerEntry(
        kind=kind,  # type: ignore[arg-type]
        iteration=iteration,
        tag=f"global_step{iteration}" if tag == "usual" else tag,
        samples=iteration * 8,
        digest=f"{iteration:016x}",
        run="a" * 16,
        time="2025-01-01T00:00:00.000Z",
        topology=Topology(dp=2, global_batch_size=8),
        details={"bytes": 100, "save_seconds": 1.5},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "megaresume" / "ledger.jsonl"
    for iteration in (10, 20, 30):
        append_ledger(path, entry(iteration))
    return path


def test_round_trip(path: Path) -> None:
    append_ledger(path, entry(30, "start", tag=None))
    append_ledger(path, entry(30, "finished", tag=None))
    reading = read_ledger(path)
    last = (entry(30, "start", tag=None), entry(30, "finished", tag=None))
    assert reading.entries == (entry(10), entry(20), entry(30), *last)
    assert reading.problems == ()
    assert reading.run == read_run(path) == "a" * 16
    assert len(path.read_bytes().splitlines()) == 5


def test_missing_is_empty(tmp_path: Path) -> None:
    reading = read_ledger(tmp_path / "ledger.jsonl")
    assert (reading.entries, reading.problems, reading.run) == ((), (), None)
    assert read_run(tmp_path / "ledger.jsonl") is None


def test_a_torn_last_line_at_every_byte(path: Path) -> None:
    data = path.read_bytes()
    start = data.rindex(b"\n", 0, len(data) - 1) + 1
    for length in range(start + 1, len(data) - 1):
        path.write_bytes(data[:length])
        torn = read_ledger(path)
        assert torn.entries == (entry(10), entry(20))
        assert [(p.line, p.kind) for p in torn.problems] == [(3, "torn")]
        assert f"torn after {length - start} bytes" in str(torn.problems[0])

        append_ledger(path, entry(40))
        after = read_ledger(path)
        assert after.entries == (entry(10), entry(20), entry(40))
        assert [(p.line, p.kind) for p in after.problems] == [(3, "cut")]


def test_a_line_that_only_lacks_its_newline_is_good(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_ledger(path).entries) == 3
    append_ledger(path, entry(40))
    reading = read_ledger(path)
    assert [e.iteration for e in reading.entries] == [10, 20, 30, 40]
    assert reading.problems == ()


def test_damaged_middle_lines_are_reported_by_number(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b'"samples": 160', b'"samples": 161') + b"noise\n" + lines[2])
    reading = read_ledger(path)
    assert [e.iteration for e in reading.entries] == [10, 30]
    assert [(p.line, p.kind) for p in reading.problems] == [(2, "damaged"), (3, "cut")]
    assert "is damaged" in str(reading.problems[0])
    assert str(reading.problems[1]).startswith("ledger line 3 is cut short")


def test_the_run_is_found_behind_a_damaged_first_line(path: Path) -> None:
    path.write_bytes(b"noise\n" + path.read_bytes())
    assert read_run(path) == "a" * 16


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "party"},
        {"iteration": "x"},
        {"tag": 5},
        {"run": None},
        {"tag": ".."},
        {"tag": ""},
        {"topology": {"dp": "2"}},
        {"topology": {"dp": [2]}},
        {"topology": 5},
        {"format": "other"},
        {"version": "1"},
        {"details": 5},
    ],
)
def test_wrong_fields_are_reported(path: Path, change: dict[str, object]) -> None:
    fields = json.loads(path.read_bytes().splitlines()[0])
    del fields["checksum"]
    with open(path, "ab") as file:
        file.write(seal(fields | change))
    reading = read_ledger(path)
    assert len(reading.entries) == 3
    assert [p.line for p in reading.problems] == [4]
    assert "lacks a field or has a wrong one" in str(reading.problems[0])


def test_a_newer_version_is_refused(path: Path) -> None:
    fields = json.loads(path.read_bytes().splitlines()[0])
    del fields["checksum"]
    path.write_bytes(seal(fields | {"version": 2}))
    with pytest.raises(NewerFormatError):
        read_ledger(path)


def test_a_directory_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="the ledger cannot be read"):
        read_ledger(tmp_path)
    with pytest.raises(StateError, match="the ledger cannot be read"):
        read_run(tmp_path)


def history(*events: int | str) -> frozenset[tuple[int, str]]:
    """Numbers are checkpoints, ``"@10"`` a start from 10, ``"!10"`` an end at 10."""
    kinds = {"@": "start", "!": "finished"}
    entries = [
        entry(int(e[1:]), kinds[e[0]], None) if isinstance(e, str) else entry(e, tag="t")  # tags do not matter here
        for e in events
    ]
    return abandoned_checkpoints(tuple(entries))


def test_given_up_branches() -> None:
    assert history("@0", 10, 20, 30) == frozenset()
    assert history(10, 20, "@20", 30) == frozenset()
    assert history(10, 12, 14, "@10") == frozenset()  # nothing came of it yet
    assert history(10, 12, 14, "@10", 15) == {(12, "t"), (14, "t")}
    assert history(10, 12, 14, "@10", 12) == {(14, "t")}  # 12 was saved again
    assert history(10, 20, "@10", 15, "@20", 30) == {(20, "t")}
    assert history(10, 12, "@10", "!10") == frozenset()  # an end saves nothing
    assert history(10, 20, "!20", "@20", 30, "!30") == frozenset()


def ways(*events: str) -> tuple[list[str], list[str]]:
    """``"10a"`` is a save ``a`` of step 10, ``"@10a"`` a start that has loaded it. Which are given up, and which led to
    the last line."""
    entries = []
    for event in events:
        kind, step, save = re.fullmatch("(@?)([0-9]+)([a-z]?)", event).groups()  # type: ignore[union-attr]
        details = {"loaded" if kind else "save_id": save} if save else {}
        entries.append(replace(entry(int(step), "start" if kind else "checkpoint"), details=details))
    with tempfile.TemporaryDirectory() as root:
        for one in entries:
            append_ledger(ledger_path(Path(root)), one)
        return sorted(saves_given_up(Path(root))), sorted(saves_of_present(Path(root)))


def test_a_start_names_what_it_has_loaded() -> None:
    assert ways("@0", "10a", "20b", "@20b", "30c") == ([], ["a", "b", "c"])
    assert ways("@0", "10a", "20b", "@10a") == ([], ["a"])
    assert ways("@0", "10a", "20b", "@10a", "15c") == (["b"], ["a", "c"])
    # Another one goes on from what was given up: then it was not.
    assert ways("@0", "10a", "20b", "@10a", "15c", "@20b") == (["b"], ["a", "b"])
    assert ways("@0", "10a", "20b", "@10a", "15c", "@20b", "30d") == (["c"], ["a", "b", "d"])
    assert ways("@0", "10a", "20b", "30c", "@10a", "15d", "@20b", "25e") == (["c", "d"], ["a", "b", "e"])
    # Of the same step, and of a later one.
    assert ways("@0", "10a", "20b", "@10a", "20c", "@20b", "30d") == (["c"], ["a", "b", "d"])
    assert ways("@0", "10a", "@10a", "40b", "@10a", "20c", "@20c", "30d") == (["b"], ["a", "c", "d"])
    # What has no name, or names what no line is of, has loaded the newest of its step.
    assert ways("@0", "10a", "20b", "@10", "15c", "@20", "30d") == (["b"], ["a", "c", "d"])
    assert ways("@0", "10a", "20b", "@10z", "15c") == (["b"], ["a", "c", "z"])


def test_lines_of_a_start_that_come_late() -> None:
    """Another machine has started since, with a ledger that did not have them: they are still of their start."""

    def line(step: int, kind: str, start: str, save: str | None) -> LedgerEntry:
        details = {"start": start, "loaded" if kind == "start" else "save_id": save}
        return replace(entry(step, kind), details=details)

    entries = [
        line(0, "start", "A", None),
        line(10, "checkpoint", "A", "a"),
        line(10, "start", "B", "a"),
        line(10, "start", "C", "a"),
        line(20, "checkpoint", "C", "c"),
        line(15, "checkpoint", "B", "b"),
        line(15, "start", "D", "b"),
        line(25, "checkpoint", "D", "d"),
    ]
    lost = [None if branch is None else str(branch) for branch in branches_of(entries)]
    assert [number for number, branch in enumerate(lost) if branch] == [4]
    lost = [None if branch is None else str(branch) for branch in branches_of(entries[:6])]
    assert [number for number, branch in enumerate(lost) if branch] == [5]


def test_lines_name_the_attempt_that_a_launch_script_has_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ledger.ATTEMPT, raising=False)
    assert ledger.with_attempt({"bytes": 1}) == {"bytes": 1}
    monkeypatch.setenv(ledger.ATTEMPT, "4711.2")
    assert ledger.with_attempt({"bytes": 1}) == {"bytes": 1, "attempt": "4711.2"}


def test_each_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger of a long run has ten thousand of them."""
    read: list[bytes] = []

    def note(line: bytes) -> dict[str, Any]:
        read.append(line)
        return unseal(line)

    monkeypatch.setattr(ledger, "unseal", note)
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(entry(n).to_bytes() for n in range(10_000)))
    assert [e.iteration for e in read_ledger(path).entries] == [*range(10_000)]
    assert read == path.read_bytes().splitlines()


def test_a_layout_that_was_read_before_is_read_with_its_types() -> None:
    assert Topology.from_dict({"dp": 1, "of a later version": 2}) == Topology(dp=1)
    with pytest.raises(ValueError, match="dp is True"):
        Topology.from_dict({"dp": True})
