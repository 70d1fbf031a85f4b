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

from megaresume.cluster.drivers.decide import BadNode
from megaresume.cluster.drivers.node_check import (
    MARK,
    Verdict,
    answer_of,
    judge,
    look,
    meet,
    start_import,
    why_not_imported,
)


def answer(
    name: str,
    *,
    problems: tuple[str, ...] = (),
    missing: tuple[str, ...] = (),
    broken: dict[str, str] | None = None,
    late: float = 0,
    met: tuple[str, ...] = ("n1", "n2", "n3"),
) -> dict[str, Any]:
    said = {"problems": list(problems), "missing": list(missing), "broken": broken or {}, "met": list(met)}
    return said | {"name": name, "time": 1000.0 - late}


def judged(*answers: dict[str, Any], asked: str = "n1 n2 n3") -> Verdict:
    by_name = {answer["name"]: answer for answer in answers}
    return judge(asked.split(), by_name, dict.fromkeys(by_name, 1000.0))


def test_all_well() -> None:
    assert judged(answer("n1"), answer("n2", late=3), answer("n3")) == Verdict(bad=())


def test_bad_nodes_are_named_with_the_reason() -> None:
    bad = judged(answer("n1", missing=("/data/web",)), answer("n2", problems=("/tmp is full",), late=-95)).bad
    assert [str(node.why) for node in bad] == [
        "has no /data/web, which other nodes have",
        "/tmp is full, its clock is 95 s fast",
        "did not answer",
    ]
    assert [node.name for node in bad] == ["n1", "n2", "n3"]


def test_what_every_node_misses_is_no_nodes_fault() -> None:
    nodes = [answer(name, missing=("/data/web",)) for name in ("n1", "n2", "n3")]
    assert judged(*nodes) == Verdict(bad=(), missing=("/data/web",))
    # but not if one of them has not answered
    verdict = judged(*nodes[:2])
    assert [node.name for node in verdict.bad] == ["n1", "n2", "n3"] and not verdict.missing


def test_what_cannot_be_imported() -> None:
    broken = {"torch": "ImportError: libgomp.so.1: no such file"}
    assert judged(answer("n1"), answer("n2", broken=broken), answer("n3")).bad == (
        BadNode(name="n2", why="cannot import torch, as other nodes can: ImportError: libgomp.so.1: no such file"),
    )
    everywhere = judged(*(answer(name, broken=broken) for name in ("n1", "n2", "n3")))
    assert everywhere == Verdict(bad=(), broken=(("torch", "ImportError: libgomp.so.1: no such file"),))


@pytest.mark.process
def test_an_import_is_tried_as_the_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.py").write_text("import no_such_library")
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 4)")
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert why_not_imported(start_import("json")) == ""
    assert why_not_imported(start_import("bad")) == "ModuleNotFoundError: No module named 'no_such_library'"
    assert why_not_imported(start_import("killed")) == "ended by signal 4"
    assert why_not_imported(start_import("slow"), patience=0.5) == ""  # the training will tell


def test_nodes_that_do_not_meet() -> None:
    bad = judged(answer("n1", met=("n1", "n2")), answer("n2"), answer("n3", met=())).bad
    assert bad == (BadNode(name="n3", why="does not reach n1, where the ranks meet"),)
    # All others: it is the first one.
    bad = judged(*(answer(name, met=()) for name in ("n1", "n2", "n3"))).bad
    assert bad == (BadNode(name="n1", why="no other node reaches it at the port of the ranks"),)
    # Of two, nobody knows. One that has not answered has no other fault.
    bad = judged(answer("n1", met=()), answer("n2", met=()), asked="n1 n2").bad
    assert [node.name for node in bad] == ["n1", "n2"]
    bad = judged(answer("n2", met=()), answer("n3", met=())).bad
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


def test_a_node_looks_at_the_training_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "vocab.json").touch()

    def missing(*training: str) -> list[str]:
        return list(look(tmp_path, "", 0, training, temporary=())["missing"])

    assert missing("train.py", "--vocab-file", "vocab.json", "--save", "runs") == []
    assert missing("gone.py", "--merge_file=gone.txt") == ["gone.py", "gone.txt"]
    assert missing("-m", "megaresume.cluster.training", "--lr", "1") == []
    assert missing("-m", "megaresume.no_such", "gone.py") == ["module megaresume.no_such"]
    assert missing("-m", "megaresume.run", "gone.py", "--tokenizer-model", "gone") == ["gone.py", "gone"]
    assert missing("-m", "megaresume.run", "-m", "no_such.package") == ["module no_such.package"]
    assert missing("-u", "gone.py") == []  # options of Python: nobody can tell


def test_a_node_looks_for_tokenizers_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", str(tmp_path))
    (tmp_path / "here.json").touch()
    data = tmp_path / "data.yaml"
    data.write_text(
        "packing: {mode: best_fit}\nsources:\n  a: {path: $MODELS/here.json, encoder: e.json}\n"
        "  b: {kind: python, factory: 'm:f', kwargs: {vocab_file: $MODELS/here.json, tokenizer: t, cache: c}}\n"
    )
    assert look(tmp_path, str(data), 0, temporary=())["missing"] == ["e.json", "t"]


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
