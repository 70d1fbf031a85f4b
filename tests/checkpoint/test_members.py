"""Every member of every record, left out or of another kind, with a right seal: refused in words, or as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.ledger import read_ledger
from megaresume.checkpoint.manifest import read_manifest
from megaresume.checkpoint.records import seal, unseal
from megaresume.checkpoint.step_file import read_marker, read_step_file
from megaresume.stream.errors import MegaresumeError

RECORDS = Path(__file__).parent / "formats" / "version1"
READERS: dict[str, Callable[[Path], object]] = {
    "step_0000010.json": read_step_file,
    "step_0000010.manifest.json": read_manifest,
    "step_0000020.saving@best.json": read_marker,
}
#: of an example of every kind, one that is not it.
OTHERS = (None, -1, 1.5, True, "", "\x1b[2J", [], [1], {}, {"a": 1}, 1 << 63)
#: the changes that pass: texts for people and ids may be empty, and counts of processes are information alone.
PASSES = {
    "step_0000010.json": [("run", ""), ("save_id", ""), ("saved_at", ""), ("topology", {}), ("topology", {"a": 1})],
    "step_0000010.manifest.json": [("save_id", ""), ("digest", ""), ("files", [])],
    "step_0000020.saving@best.json": [("save_id", ""), ("run", ""), ("began_at", "")],
}
#: of the lines of the ledger, all of them; of a checkpoint's, whose details they are, three more.
OF_LINES = [("tag", None), ("digest", ""), ("run", ""), ("time", ""), ("topology", {}), ("topology", {"a": 1})]
OF_DETAILS = [("details", "left out"), ("details", {}), ("details", {"a": 1})]


def changes(fields: dict[str, Any]) -> Iterator[tuple[str, object, dict[str, Any]]]:
    for name in fields:
        if name not in ("format", "version", "checksum"):
            rest = {key: value for key, value in fields.items() if key not in (name, "checksum")}
            yield name, "left out", rest
            for other in OTHERS:
                if other != fields[name] or type(other) is not type(fields[name]):
                    yield name, other, rest | {name: other}


def accepted(name: str, tmp_path: Path) -> list[tuple[str, object]]:
    path = tmp_path / name
    found = []
    for member, what, fields in changes(unseal((RECORDS / name).read_bytes())):
        path.write_bytes(seal(fields, depth=1))
        try:
            READERS[name](path)
        except MegaresumeError as error:
            assert "lacks a field or has one of the wrong kind" in str(error) or "data state" in error.headline
        else:
            found.append((member, what))
    return found


@pytest.mark.parametrize("name", READERS)
def test_files(name: str, tmp_path: Path) -> None:
    assert accepted(name, tmp_path) == PASSES[name]


def test_lines_of_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for line in (RECORDS / "ledger.jsonl").read_bytes().splitlines(keepends=True):
        found = []
        original = unseal(line)
        for member, what, fields in changes(original):
            path.write_bytes(seal(fields))
            reading = read_ledger(path)
            if reading.entries:
                found.append((member, what))
            else:
                assert "lacks a field or has a wrong one" in str(reading.problems[0])
        assert found == OF_LINES + (OF_DETAILS if "details" in original else [])
