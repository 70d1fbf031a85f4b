from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.checkpoint.lock.lock import write_latest, write_tracker
from megaresume.checkpoint.records.names import LATEST, TRACKER
from megaresume.checkpoint.records.pointers import read_pointer, read_pointers
from megaresume.stream.errors import UsageError


@pytest.fixture
def save_dir(tmp_path: Path) -> Path:
    (tmp_path / "global_step10").mkdir()
    (tmp_path / "iter_0000020").mkdir()
    (tmp_path / "best").mkdir()
    return tmp_path


def test_what_is_written_is_what_the_frameworks_write(save_dir: Path) -> None:
    write_latest(save_dir, "global_step10")
    write_tracker(save_dir, 10)
    assert (save_dir / "latest").read_bytes() == b"global_step10"
    assert (save_dir / "latest_checkpointed_iteration.txt").read_bytes() == b"10"
    latest, tracker = read_pointers(save_dir)
    assert (latest.status, latest.tag, latest.iteration) == ("ok", "global_step10", 10)
    assert (tracker.status, tracker.tag, tracker.iteration) == ("ok", "global_step10", 10)
    assert latest.problem is tracker.problem is None


@pytest.mark.parametrize("text", ["iter_0000020", "iter_0000020\n", "best"])
def test_latest_names_any_directory(save_dir: Path, text: str) -> None:
    (save_dir / LATEST).write_text(text)
    assert read_pointer(save_dir, LATEST).status == "ok"


def test_release(save_dir: Path) -> None:
    (save_dir / TRACKER).write_text("release")
    assert read_pointer(save_dir, TRACKER).status == "dangling"
    (save_dir / "release").mkdir()
    pointer = read_pointer(save_dir, TRACKER)
    assert (pointer.status, pointer.tag, pointer.iteration, pointer.problem) == ("release", "release", None, None)


@pytest.mark.parametrize(
    ("name", "data", "status", "words"),
    [
        (LATEST, b"", "empty", "latest is empty"),
        (LATEST, b" \n\n", "empty", "latest is empty"),
        (LATEST, b"global_step99", "dangling", "names 'global_step99', but there is no such"),
        (LATEST, b"../../etc", "garbled", "not a tag"),
        (LATEST, b"/etc", "garbled", "not a tag"),
        (LATEST, b"\x00\x00\x00\x00", "garbled", "not a tag"),
        (LATEST, b"\xff\xfe1", "dangling", "no such checkpoint directory"),
        (LATEST, b"a\nb", "garbled", "not a tag"),
        (LATEST, b"x" * 100_000, "garbled", "not a tag"),
        (TRACKER, b"", "empty", "latest_checkpointed_iteration.txt is empty"),
        (TRACKER, b"30", "dangling", "names '30', but there is no such"),
        (TRACKER, b"-10", "garbled", "holds '-10', not an iteration or 'release'"),
        (TRACKER, b"1e1", "garbled", "not an iteration"),
        (TRACKER, b"1_0", "garbled", "not an iteration"),
        (TRACKER, "１０".encode(), "garbled", "not an iteration"),
        (TRACKER, b"9" * 5000, "garbled", "not an iteration"),
        (TRACKER, b"global_step10", "garbled", "not an iteration"),
    ],
)
def test_what_is_wrong_is_named(save_dir: Path, name: str, data: bytes, status: str, words: str) -> None:
    (save_dir / name).write_bytes(data)
    pointer = read_pointer(save_dir, name)  # type: ignore[arg-type]
    assert pointer.status == status
    assert pointer.problem is not None
    assert words in pointer.problem
    assert len(pointer.problem) < 300


def test_absent_and_unreadable(save_dir: Path) -> None:
    assert read_pointer(save_dir, LATEST).status == "absent"
    (save_dir / LATEST).mkdir()
    pointer = read_pointer(save_dir, LATEST)
    assert pointer.status == "unreadable"
    assert pointer.problem is not None
    assert "a directory, not a file" in pointer.problem


def test_an_impossible_tag_is_not_written(save_dir: Path) -> None:
    with pytest.raises(UsageError):
        write_latest(save_dir, "../elsewhere")
    assert not (save_dir / LATEST).exists()
