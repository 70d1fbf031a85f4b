"""Every member of every record, left out or of another kind, with a right seal: refused in words, or as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.manifest import read_manifest
from megaresume.checkpoint.records.marker import read_marker
from megaresume.checkpoint.records.sealed import from_members, seal, unseal
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.stream.errors import MegaresumeError

FORMATS = Path(__file__).parent / "formats"
VERSIONS = sorted(path.name for path in FORMATS.iterdir() if path.is_dir())
READERS: dict[str, Callable[[Path], object]] = {
    "step_0000010.json": read_step_file,
    "step_0000010.manifest.json": read_manifest,
    "step_0000020.saving@best.json": read_marker,
}
#: of an example of every kind, one that is not it.
OTHERS = (None, -1, 1.5, True, "", "\x1b[2J", [], [1], {}, {"a": 1}, 1 << 63)
#: the changes that pass, by version: texts for people and ids may be empty, counts of processes are information alone.
PASSES = {
    "version1/step_0000010.json": [
        ("run", ""),
        ("save_id", ""),
        ("saved_at", ""),
        ("topology", {}),
        ("topology", {"a": 1}),
    ],
    "version1/step_0000010.manifest.json": [("save_id", ""), ("digest", ""), ("files", [])],
    "version1/step_0000020.saving@best.json": [("save_id", ""), ("run", ""), ("began_at", "")],
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


def accepted(folder: Path, name: str, tmp_path: Path) -> list[tuple[str, object]]:
    path = tmp_path / name
    found = []
    for member, what, fields in changes(unseal((folder / name).read_bytes())):
        path.write_bytes(seal(fields, depth=1))
        try:
            READERS[name](path)
        except MegaresumeError as error:
            assert "lacks a field or has one of the wrong kind" in str(error) or "data state" in error.headline
        else:
            found.append((member, what))
    return found


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("version", VERSIONS)
def test_files(version: str, name: str, tmp_path: Path) -> None:
    assert accepted(FORMATS / version, name, tmp_path) == PASSES[f"{version}/{name}"]


def test_a_field_that_nothing_reads() -> None:
    """A fault of the program is not blamed on the file."""

    @dataclass
    class Record:
        name: str
        seconds: float = 0.0
        by_rank: dict[str, int] | None = None

    with pytest.raises(NotImplementedError, match=r"Record has seconds: float, by_rank: dict\[str, int\]: give"):
        from_members(Record, {"name": "one"})
    with pytest.raises(NotImplementedError, match="a reader of names"):
        from_members(Record, {"name": "one"}, seconds=float, by_rank=dict, names=str)


@pytest.mark.parametrize("version", VERSIONS)
def test_lines_of_the_ledger(version: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for line in (FORMATS / version / "ledger.jsonl").read_bytes().splitlines(keepends=True):
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
