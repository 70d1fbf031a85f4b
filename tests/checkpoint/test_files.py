from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.checkpoint.records.ledger import append_lines
from megaresume.files import open_file, read_file
from megaresume.stream.errors import CheckpointError

pytestmark = pytest.mark.timeout(60)  # what is refused here would otherwise be waited for


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a socket": make_socket,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    KINDS[kind](path)
    with pytest.raises(OSError, match=f"{kind}, not a file") as found:
        open_file(path)
    assert found.value.filename == str(path)


def test_a_file_is_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    (tmp_path / "link").symlink_to("f")
    assert read_file(tmp_path / "link") == b"content"


def test_no_line_is_lost_in_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ledger.jsonl")
    with pytest.raises(CheckpointError, match="cannot write") as found:
        append_lines(tmp_path / "ledger.jsonl", [b"{}\n"])
    assert found.value.found == "a pipe, not a file"
