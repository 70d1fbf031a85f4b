"""Faults ride in a state, and change nothing of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megaresume.stream.errors import StateError
from megaresume.stream.fields import comparable
from megaresume.stream.left_out import MAX_FAULTS, FaultRecord, Faults
from megaresume.stream.state import StreamState
from megaresume.stream.state_text import checksum
from megaresume.stream.stream import Stream

DATA = {"seq_length": 8, "packing": "best_fit", "sources": {"a": {}}}
LENGTHS = {"a": [3, 5, 2, 7]}
FAULTS = [FaultRecord(k, "a", k % 4, 0, "mask", "truncated JPEG") for k in (9, 2, 5, 30)]


def test_carried_over_a_restore_and_counted_once(stream_of: Callable[..., Stream]) -> None:
    whole = stream_of(DATA, LENGTHS)
    first = StreamState.from_json(whole.state_at(6, faults=FAULTS).to_json())
    assert [f.sample for f in first.faults.kept] == [2, 5] and first.faults.total == 2
    resumed = stream_of(DATA, LENGTHS, first)
    # What it is given covers the samples since the restore, and more, and twice; as tuples or records.
    given = [*FAULTS, (12, "a", 0, 1, "truncate", "longer"), FAULTS[0]]
    later = StreamState.from_json(resumed.state_at(20, faults=given).to_json())
    assert [(f.sample, f.policy) for f in later.faults.kept] == [
        (2, "mask"),
        (5, "mask"),
        (9, "mask"),
        (12, "truncate"),
    ]
    assert later.faults.total == 4
    assert resumed.state_at(20, faults=given).faults == whole.state_at(20, faults=given).faults


def test_no_part_of_what_is_compared(stream_of: Callable[..., Stream]) -> None:
    stream = stream_of(DATA, LENGTHS)
    plain, faulty = stream.state_at(10), stream.state_at(10, faults=FAULTS)
    assert plain.digest == faulty.digest and plain.faults != faulty.faults
    names = list(StreamState.__slots__)
    fields = [{n: getattr(s, n) for n in names} for s in (plain, faulty)]
    assert comparable(fields[0]) == comparable(fields[1])
    assert "faults" not in comparable(fields[0])


def test_the_newest_are_kept() -> None:
    """The same thousand, whatever the restarts."""
    faults = [FaultRecord(k // 2, "a", k % 2, 0, "mask", "x") for k in range(3000)]
    at_once = Faults().with_new(reversed(faults), 0, 1500)
    in_parts = Faults().with_new(faults, 0, 700).with_new(faults, 700, 1500)
    assert at_once == in_parts
    assert at_once.total == 3000 and list(at_once.kept) == faults[-MAX_FAULTS:]


@pytest.mark.parametrize(
    "plain",
    [
        {"total": 0, "kept": [[1, "a", 2, 0, "mask", "x"]]},
        {"total": 2, "kept": [[3, "a", 2, 0, "mask", "x"], [1, "a", 2, 0, "mask", "x"]]},
        {"total": 1, "kept": [[1, "a", -2, 0, "mask", "x"]]},
        {"total": 1, "kept": [[1, 5, 2, 0, "mask", "x"]]},
        {"total": 1, "kept": [[1, "a", 2]]},
    ],
)
def test_damaged(plain: dict[str, object], stream_of: Callable[..., Stream]) -> None:
    body = {k: v for k, v in stream_of(DATA, LENGTHS).state_at(3).to_dict().items() if k != "checksum"}
    body["faults"] = plain
    with pytest.raises(StateError, match="lacks a field or has one of the wrong kind"):
        StreamState.from_json(body | {"checksum": checksum(body)})
