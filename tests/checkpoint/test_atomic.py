from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from megaresume.files import fsync_file, is_leftover, remove_leftovers, write_all, write_atomic
from megaresume.stream.errors import CheckpointError


def fail(code: int):
    def call(*args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


def test_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("write", errno.ENOSPC, "the disk is full"),
        ("write", errno.EDQUOT, "the quota is used up"),
        ("open", errno.EROFS, "mounted read-only"),
        ("open", errno.EACCES, "no permission"),
        ("fsync", errno.EIO, "device or the network filesystem fails"),
        ("replace", errno.EIO, "device or the network filesystem fails"),
        ("write", errno.EROFS, "mounted read-only"),  # by the kernel, in the middle of a run
        ("fsync", errno.ESTALE, "a stale handle"),
        ("open", errno.ESTALE, "a stale handle"),
    ],
)
def test_a_refusing_disk_is_named_and_the_old_content_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int, words: str
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail(code))
        with pytest.raises(CheckpointError, match=words):
            write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_filesystem_without_fsync_is_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "fsync", fail(code))
    write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    write_all(descriptor, b"0123456789")
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_directory_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match="a directory has the name of the file"):
        write_atomic(tmp_path / "latest", b"x")
    assert os.listdir(tmp_path) == ["latest"]


def test_leftovers_are_recognised_and_removed_and_nothing_else(tmp_path: Path) -> None:
    leftover = ".latest.megaresume-123-0a1b2c3d.tmp"
    assert is_leftover(leftover)
    for name in (leftover, "latest", ".hidden", "x.tmp"):
        (tmp_path / name).write_bytes(b"")
    assert remove_leftovers(tmp_path) == 1
    assert sorted(os.listdir(tmp_path)) == [".hidden", "latest", "x.tmp"]
    assert remove_leftovers(tmp_path / "missing") == 0


@pytest.mark.parametrize(
    ("code", "asked"), [(0, ["whole"]), (errno.ENOTSUP, ["whole", "fsync"]), (errno.EIO, ["whole"])]
)
def test_on_macos_the_disk_is_asked_to_empty_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, asked: list[str]
) -> None:
    def whole(_descriptor: int, command: int) -> None:
        calls.append("whole")
        assert command == 51
        if code:
            raise OSError(code, os.strerror(code))

    calls: list[str] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", whole)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    with open(tmp_path / "file", "xb") as file:
        if code == errno.EIO:
            with pytest.raises(OSError, match="Input/output"):
                fsync_file(file.fileno())
        else:
            fsync_file(file.fileno())
    assert calls == asked
