"""``megaresume.attach(log_samples=...)``: real DeepSpeed engines on two processes, one of which goes back; and what
verify says of their logs when something in them, or in the corpora, is changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.records.sealed import seal, unseal
from megaresume.program import main
from tests.hosts.conftest import HERE
from tests.hosts.conftest import data_yaml as data_yaml
from tests.hosts.conftest import launch as launch


@pytest.fixture(scope="module")
def made(launch: Any, data_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``save`` and ``logs``."""
    root = tmp_path_factory.mktemp("logged")
    status, output = launch(str(HERE / "scenario_log.py"), data_yaml, root)
    assert status == 0, output[-4000:]
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy, to be broken."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def verify(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    status = main(["verify", *map(str, words), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if found["holds"] else 1)
    return found


def change(path: Path, step: int, **fields: Any) -> None:
    """Another value in the last line of a step, sealed again."""
    lines = path.read_bytes().splitlines(keepends=True)
    at = max(k for k, line in enumerate(lines) if unseal(line)["step"] == step and unseal(line)["event"] == "step")
    record = {key: value for key, value in unseal(lines[at]).items() if key != "checksum"}
    lines[at] = seal(record | fields)
    path.write_bytes(b"".join(lines))


def test_every_rank_and_what_was_done_again(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = verify(capsys, made / "save", "--log-samples", made / "logs", "--content")["log"]
    # Steps 1, 2 of the first launch, 3 to 7 of the second; two ranks; 3, 4 and 5 were lost.
    assert log == log | {"holds": True, "steps": 7, "lines": 14, "contents": 14, "seen": 14, "lost": 6, "given_up": 0}
    assert log["first_difference"] is None and log["missing"] == log["unreadable"] == []


def test_a_range(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = verify(capsys, made / "save", "--from", 2, "--to", 6, "--log-samples", made / "logs")
    assert found["log"]["steps"] == 4 and found["log"]["contents"] == 0
    assert {p["samples"] for p in found["points"]} == {16, 32, 48}


@pytest.mark.parametrize("field", ["order", "content", "samples"])
def test_the_first_step_and_rank_that_differ(root: Path, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (6, 4):
        value: Any = [[24, 26], [30, 32]] if field == "samples" else "0" * 16
        change(root / "logs" / "rank_00001.jsonl", step, **{field: value})
    found = verify(capsys, root / "save", "--log-samples", root / "logs", "--content")
    assert not found["holds"] and found["first_difference"] is None
    difference = found["log"]["first_difference"]
    assert (difference["step"], difference["rank"], difference["field"]) == (4, "rank 1", field)
    assert found["log"]["different_steps"] == 2 and found["log"]["steps"] == 5


def test_tokens_that_changed(root: Path, data_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths are what they were; of a small corpus the fingerprint sees every token."""
    corpora = Path(shutil.copytree(data_yaml.parent, tmp_path / "corpora"))
    words = root / "save", "--data", corpora / "data.yaml", "--content"
    before = verify(capsys, *words)
    assert before["holds"] and set(before["content"]) == {"web", "code"}
    assert before["content"]["web"]["documents"] == 23
    tokens = (corpora / "web.bin").read_bytes()
    (corpora / "web.bin").write_bytes(bytes(byte ^ 1 for byte in tokens))
    found = verify(capsys, *words)
    assert not found["holds"] and "web.contents" in found["corpora"][0] and len(found["corpora"]) == 1


def test_lines_that_lack_or_are_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "logs" / "rank_00001.jsonl"
    intact = path.read_bytes()
    path.write_bytes(intact + intact[-200:-90])  # a machine died while appending
    found = verify(capsys, root / "save", "--log-samples", root / "logs")
    assert found["holds"] and len(found["log"]["unreadable"]) == 1
    lines = intact.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3] + lines[-2:]))
    found = verify(capsys, root / "save", "--log-samples", root / "logs")
    assert not found["holds"] and found["log"]["missing"] == [{"step": 5, "ranks": [1]}]
    path.write_bytes(intact.replace(b'"step": 6', b'"step": 9'))
    found = verify(capsys, root / "save", "--log-samples", root / "logs")
    assert not found["holds"] and "rank_00001.jsonl" in found["log"]["unreadable"][0]


def test_the_last_lines_before_a_checkpoint_are_cut_off(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that is in a checkpoint was written down before: only after it may a kill have come between."""
    paths = [root / "logs" / f"rank_0000{rank}.jsonl" for rank in (0, 1)]
    for number, path in enumerate(reversed(paths)):
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
        found = verify(capsys, root / "save", "--log-samples", root / "logs")
        assert not found["holds"] and found["log"]["missing"] == [{"step": 6, "ranks": [[1], []][number]}]


def test_a_launch_that_wrote_nothing_down(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (root / "logs").iterdir():
        lines = path.read_bytes().splitlines(keepends=True)
        starts = [number for number, line in enumerate(lines) if b'"event": "start"' in line]
        path.write_bytes(b"".join(lines[starts[-1] :]))
    found = verify(capsys, root / "save", "--log-samples", root / "logs")
    assert found["holds"] and found["log"]["unlogged"] == [[1, 3]]


def test_lines_without_their_start(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "logs" / "rank_00001.jsonl"
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    found = verify(capsys, root / "save", "--log-samples", root / "logs")
    assert not found["holds"] and "line 1 is of a step, and no start is before it" in found["log"]["unreadable"][0]


def test_bad_input(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(made / "save"), "--log-samples", str(tmp_path)]) == 2
    assert "holds no steps" in capsys.readouterr().err
    assert main(["verify", str(made / "save"), "--from", "3"]) == 2
    assert "2 or 4 is the nearest" in capsys.readouterr().err
    assert main(["verify", str(made / "save"), "--from", "6", "--to", "4"]) == 2
    assert "exchange the two" in capsys.readouterr().err
