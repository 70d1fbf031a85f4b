from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.lock.lock import write_step_file
from megaresume.checkpoint.records.marker import Marker, read_marker, write_marker
from megaresume.checkpoint.records.sealed import seal
from megaresume.checkpoint.records.step_file import StepFile, read_step_file
from megaresume.checkpoint.system import Topology
from megaresume.stream.errors import CheckpointError, NewerFormatError, StateError
from megaresume.stream.state import StreamState


@pytest.fixture
def record(state: Callable[..., StreamState]) -> StepFile:
    return StepFile(
        iteration=10,
        tag="global_step10",
        run="0" * 16,
        save_id="1" * 16,
        saved_at="2025-01-01T00:00:00.000Z",
        topology=Topology(dp=2, global_batch_size=8),
        state=state(80),
    )


@pytest.fixture
def path(tmp_path: Path, record: StepFile) -> Path:
    path = tmp_path / "step_0000010.json"
    write_step_file(path, record)
    return path


def reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    change(fields)
    path.write_bytes(seal(fields, depth=3))


def test_round_trip(path: Path, record: StepFile) -> None:
    assert read_step_file(path, iteration=10, tag="global_step10", run="0" * 16) == record


def test_the_state_inside_is_the_one_that_rides_with_the_weights(path: Path, record: StepFile) -> None:
    assert json.loads(path.read_bytes())["state"] == record.envelope.to_dict()


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="the data state is missing"):
        read_step_file(tmp_path / "step_0000010.json")


def test_empty(path: Path) -> None:
    path.write_bytes(b"")
    with pytest.raises(StateError, match="the data state is empty"):
        read_step_file(path)


def test_cut_short_anywhere(path: Path) -> None:
    data = path.read_bytes()
    for length in range(1, len(data) - 1, 3):
        path.write_bytes(data[:length])
        with pytest.raises(StateError, match=r"cut short|no checksum|is damaged"):
            read_step_file(path)


def test_flipped_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b'"samples": 80') + 11] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match="the data state is damaged") as caught:
        read_step_file(path)
    assert not isinstance(caught.value, NewerFormatError)


@pytest.mark.parametrize("where", ["envelope", "state"])
def test_newer_version(path: Path, where: str) -> None:
    reseal(path, lambda fields: (fields if where == "envelope" else fields["state"]).update(version=99))
    with pytest.raises(NewerFormatError, match="written by a newer megaresume"):
        read_step_file(path)


def test_a_damaged_version_is_damage_and_no_newer_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 9'))
    with pytest.raises(StateError, match="is damaged") as caught:
        read_step_file(path)
    assert not isinstance(caught.value, NewerFormatError)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"run": "f" * 16}, "belongs to another run"),
        ({"iteration": 20}, "belongs to another step"),
        ({"tag": "best"}, "belongs to another tag directory"),
    ],
)
def test_foreign(path: Path, expected: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        read_step_file(path, **expected)


def test_another_kind_of_file(path: Path) -> None:
    reseal(path, lambda fields: fields.update(format="megaresume.manifest"))
    with pytest.raises(StateError, match="another kind of file"):
        read_step_file(path)


@pytest.mark.parametrize("value", [None, "1", True, 0, 1.0])
def test_no_version(path: Path, value: object) -> None:
    reseal(path, lambda fields: fields.update(version=value))
    with pytest.raises(StateError, match="has no version"):
        read_step_file(path)


@pytest.mark.parametrize("field", ["iteration", "tag", "run", "save_id", "saved_at", "topology"])
@pytest.mark.parametrize("value", [None, -1, [1]])
def test_wrong_fields(path: Path, field: str, value: object) -> None:
    reseal(path, lambda fields: fields.update({field: value}))
    with pytest.raises(StateError, match="lacks a field or has one of the wrong kind"):
        read_step_file(path)


def test_a_state_that_fails_its_own_checksum(path: Path) -> None:
    reseal(path, lambda fields: fields["state"].update(samples=81))
    with pytest.raises(StateError, match="the data state is damaged"):
        read_step_file(path)


def test_no_state(path: Path) -> None:
    reseal(path, lambda fields: fields.pop("state"))
    with pytest.raises(StateError, match="there is no data state"):
        read_step_file(path)


def test_a_directory_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "step_0000010.json").mkdir()
    with pytest.raises(StateError, match="cannot be read"):
        read_step_file(tmp_path / "step_0000010.json")


@pytest.mark.parametrize("tag", ["..", ".", "", "a/b", "/etc"])
def test_a_tag_that_leads_elsewhere(path: Path, tag: str) -> None:
    reseal(path, lambda fields: fields.update(tag=tag))
    with pytest.raises(StateError, match="lacks a field or has one of the wrong kind") as found:
        read_step_file(path)
    assert repr(tag) in str(found.value)


def test_a_marker_that_leads_elsewhere(path: Path) -> None:
    marker = Marker.of(read_step_file(path), latest=True, tracker=False)
    write_marker(path, replace(marker, tag=".."))
    with pytest.raises(CheckpointError, match="lacks a field or has one of the wrong kind"):
        read_marker(path)


def test_the_state_of_another_iteration_in_it(path: Path) -> None:
    reseal(path, lambda fields: fields.update(iteration=20))
    with pytest.raises(StateError, match="the data state"):
        read_step_file(path)
