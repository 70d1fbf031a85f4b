"""What a node says of itself, and what follows from the answers of all of them."""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaresume.launching.decide import BadNode
from megaresume.launching.node_check import MARK, answer_of, judge, look, meet


def answer(
    name: str,
    *,
    problems: tuple[str, ...] = (),
    missing: tuple[str, ...] = (),
    late: float = 0,
    met: tuple[str, ...] = ("n1", "n2", "n3"),
) -> dict[str, Any]:
    said = {"problems": list(problems), "missing": list(missing), "met": list(met)}
    return said | {"name": name, "time": 1000.0 - late}


def judged(*answers: dict[str, Any], asked: str = "n1 n2 n3") -> tuple[tuple[BadNode, ...], tuple[str, ...]]:
    by_name = {answer["name"]: answer for answer in answers}
    return judge(asked.split(), by_name, dict.fromkeys(by_name, 1000.0))


def test_all_well() -> None:
    assert judged(answer("n1"), answer("n2", late=3), answer("n3")) == ((), ())


def test_bad_nodes_are_named_with_the_reason() -> None:
    bad, _ = judged(answer("n1", missing=("/data/web",)), answer("n2", problems=("/tmp is full",), late=-95))
    assert [str(node.why) for node in bad] == [
        "has no /data/web, which other nodes have",
        "/tmp is full, its clock is 95 s fast",
        "did not answer",
    ]
    assert [node.name for node in bad] == ["n1", "n2", "n3"]


def test_what_every_node_misses_is_no_nodes_fault() -> None:
    nodes = [answer(name, missing=("/data/web",)) for name in ("n1", "n2", "n3")]
    assert judged(*nodes) == ((), ("/data/web",))
    # but not if one of them has not answered
    bad, everywhere = judged(*nodes[:2])
    assert [node.name for node in bad] == ["n1", "n2", "n3"] and not everywhere


def test_nodes_that_do_not_meet() -> None:
    bad, _ = judged(answer("n1", met=("n1", "n2")), answer("n2"), answer("n3", met=()))
    assert bad == (BadNode(name="n3", why="does not reach n1, where the ranks meet"),)
    # All others: it is the first one.
    bad, _ = judged(*(answer(name, met=()) for name in ("n1", "n2", "n3")))
    assert bad == (BadNode(name="n1", why="no other node reaches it at the port of the ranks"),)
    # Of two, nobody knows. One that has not answered has no other fault.
    bad, _ = judged(answer("n1", met=()), answer("n2", met=()), asked="n1 n2")
    assert [node.name for node in bad] == ["n1", "n2"]
    bad, _ = judged(answer("n2", met=()), answer("n3", met=()))
    assert bad == (BadNode(name="n1", why="did not answer"),)


def test_nodes_meet_at_the_first_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place: dict[str, Any] = {"address": "127.0.0.1", "port": port, "count": 3}
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(meet, name, is_first=False, **place) for name in ("n2", "n3")]
        assert meet("n1", is_first=True, **place) == ["n1", "n2", "n3"]
        assert [other.result() for other in others] == [["n1", "n2", "n3"]] * 2
        other = pool.submit(meet, "n2", is_first=False, **place)
        assert meet("n1", is_first=True, patience=0.5, **place) == ["n1", "n2"] == other.result()
    with socket.create_server(("", port)):  # taken
        assert meet("n1", is_first=True, **place) == []
    assert meet("n1", is_first=True, **place | {"count": 1}) == ["n1"]


def test_a_node_looks_at_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    (tmp_path / "web.idx").touch()
    data = tmp_path / "data.yaml"
    data.write_text(
        "sources:\n  web: {path: web}\n  code: {path: code}\n  far: {path: s3://bucket/x}\nvalid: [{path: v}]\n"
    )
    here = (str(tmp_path),)
    said = look(tmp_path, str(data), 0, temporary=here)
    assert (said["name"], said["problems"], said["missing"]) == ("n7", [], ["code", "v"])
    assert answer_of("0: " + MARK + json.dumps(said)) == said
    assert answer_of("pyxis: imported image") is None and answer_of(MARK + "{") is None
    assert look(tmp_path, str(tmp_path / "none.yaml"), 0, temporary=here)["missing"] == [str(tmp_path / "none.yaml")]
    away = look(tmp_path / "run", "", 0, temporary=here)
    assert away["problems"] == [f"does not see RUN_DIR={tmp_path / 'run'}"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=1 << 20))
    said = look(tmp_path, "", 0, temporary=(str(tmp_path),))
    assert said["problems"] == [f"{tmp_path} is full: 10 MiB left"] * 2


def test_a_disk_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refuse)
    said = look(tmp_path, "", 0, temporary=(str(tmp_path),))
    assert said["problems"][0] == f"{tmp_path} cannot be written: Read-only file system"
