"""`megaresume doctor`: directories in every state, conflicts with the next launch, what is printed."""

from __future__ import annotations

import errno
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.lock.lock import write_step_file
from megaresume.checkpoint.records.ledger import append_lines
from megaresume.checkpoint.records.names import step_path
from megaresume.checkpoint.records.sealed import seal
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.system import Topology
from megaresume.program import main
from megaresume.stream.state import StreamState
from tests.cli.conftest import SavedRun, megaresume, run  # noqa: F401  a fixture
from tests.cli.test_latest import WRITERS, archive, write_hugging_face, write_megatron, write_verl, write_zero

pytestmark = pytest.mark.process


def doctor(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[dict[str, str]]]:
    """(exit status, checks of the directory and the logs)."""
    status = main(["doctor", *map(str, words), "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    return status, [check for check in checks if check["area"] in ("checkpoints", "log")]


def of(checks: list[dict[str, str]], name: str) -> dict[str, str]:
    (check,) = [check for check in checks if check["name"] == name]
    return check


@pytest.fixture(autouse=True)
def nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "run" in request.fixturenames:
        request.getfixturevalue("run")  # compiled functions come from a cache of pickles: before, not here

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


@pytest.mark.parametrize("write", WRITERS)
def test_a_sound_directory_and_a_killed_save(tmp_path: Path, write: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(write)
    root = tmp_path / "ckpt"
    path = write(root, 4)
    status, checks = doctor(capsys, root)
    assert status == 0 and {check["status"] for check in checks} == {"ok"}
    assert path.name in of(checks, "newest")["found"]
    newer = write(root, 10, complete=False).name
    status, checks = doctor(capsys, root)
    assert of(checks, newer)["status"] == "warning" and path.name in of(checks, "newest")["found"]
    # DeepSpeed's pointer has moved to it already: without us the next start takes it, and fails.
    assert status == (write is write_zero)
    if write is write_zero:
        assert "latest names global_step10" in of(checks, "pointer")["found"]


def test_pointers_and_leftovers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_megatron(tmp_path, 4)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    (tmp_path / "latest_checkpointed_iteration.txt.tmp").touch()
    status, checks = doctor(capsys, tmp_path)
    assert status == 1 and "is empty" in of(checks, "pointer")["found"]
    assert of(checks, "pointer")["action"] == f"printf %s 4 > {tracker}"
    assert of(checks, "temporary files")["found"] == "latest_checkpointed_iteration.txt.tmp"
    tracker.unlink()
    assert "there is no latest_checkpointed" in of(doctor(capsys, tmp_path)[1], "pointer")["found"]
    tracker.write_text("")
    (tmp_path / "iter_0000004").rename(tmp_path / "release")
    assert of(doctor(capsys, tmp_path)[1], "pointer")["action"] == f"printf %s release > {tracker}"
    write_zero(tmp_path / "a b", 4)
    (tmp_path / "a b" / "latest").unlink()
    action = of(doctor(capsys, tmp_path / "a b")[1], "pointer")["action"]
    assert action == f"printf %s global_step4 > '{tmp_path}/a b/latest'"
    write_zero(tmp_path / "both", 4)
    write_zero(tmp_path / "both", 6)
    (tmp_path / "both" / "latest_checkpointed_iteration.txt").write_text("4")
    _, checks = doctor(capsys, tmp_path / "both")
    notes = [check["found"] for check in checks if check["name"] == "newest"]
    assert any("the pointers disagree" in note for note in notes)


def test_what_cannot_be_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_zero(tmp_path, 4)
    (tmp_path / "megaresume").symlink_to("megaresume")
    (tmp_path / "other").symlink_to("other")
    status, checks = doctor(capsys, tmp_path)
    assert status == 1 and of(checks, "ledger")["found"].endswith("Too many levels of symbolic links")
    assert "global_step4 is complete" in of(checks, "newest")["found"]


def test_nothing_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(capsys, tmp_path)[0] == 0  # nothing saved yet
    write_hugging_face(tmp_path, 4, complete=False)
    status, checks = doctor(capsys, tmp_path)
    assert status == 1 and "trainer_state.json is missing" in of(checks, "newest")["found"]
    assert main(["doctor", str(tmp_path / "checkpoint-4")]) == 2
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert main(["doctor", "--dp", "4"]) == 2
    assert main(["doctor", "--log", str(tmp_path / "nowhere")]) == 2


def test_older_ones_are_no_fallback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (2, 4, 6):
        write_zero(tmp_path, number)
    (tmp_path / "global_step4" / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04torn")
    status, checks = doctor(capsys, tmp_path)
    assert status == 0 and "is cut short" in of(checks, "global_step4")["found"]
    assert not [check for check in doctor(capsys, tmp_path, "--last", 1)[1] if check["name"] == "global_step4"]


def test_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_zero(tmp_path / "zero", 4)
    status, checks = doctor(capsys, tmp_path / "zero", "--dp", 4)
    assert status == 1 and of(checks, "ranks")["found"].startswith("saved with ZeRO 2 on 2 data-parallel ranks")
    assert "ds_to_universal" in of(checks, "ranks")["action"]
    status, checks = doctor(capsys, tmp_path / "zero", "--dp", 2, "--zero-stage", 1)
    assert status == 0 and of(checks, "ranks")["status"] == "ok"
    layout = Topology(dp=2, zero_stage=2).to_dict()
    line = {"format": "megaresume.ledger", "version": 1, "kind": "checkpoint", "iteration": 4, "tag": "global_step4"}
    line |= {"samples": 32, "digest": "0" * 16, "run": "a" * 16, "time": "-", "topology": layout}
    append_lines(tmp_path / "zero" / "megaresume" / "ledger.jsonl", [seal(line)])
    action = of(doctor(capsys, tmp_path / "zero", "--dp", 4)[1], "ranks")["action"]
    assert action == f"start on 2 ranks, or: megaresume convert {tmp_path / 'zero'} --tag global_step4"
    path = write_hugging_face(tmp_path / "hf", 4)
    write_zero(path, 4)
    (path / "rng_state.pth").unlink()
    for rank in (0, 1):
        archive(path / f"rng_state_{rank}.pth", {})
    assert doctor(capsys, tmp_path / "hf", "--dp", 8)[0] == 1
    assert doctor(capsys, tmp_path / "hf", "--dp", 2)[0] == 0
    write_verl(tmp_path / "verl", 4)
    status, checks = doctor(capsys, tmp_path / "verl", "--dp", 2)
    assert status == 1 and "FSDP's files are for 1 ranks" in of(checks, "ranks")["found"]


def test_a_run_under_megaresume(run: SavedRun, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    status, checks = doctor(capsys, run.save)
    assert status == 0 and "by its manifest" in of(checks, "newest")["found"]
    weights = run.save / "global_step12" / "mp_rank_00_model_states.pt"
    weights.write_bytes(b"")
    with open(run.save / "megaresume" / "ledger.jsonl", "a") as ledger:
        ledger.write('{"torn')
    status, checks = doctor(capsys, run.save)
    assert status == 1 and "has 0 bytes" in of(checks, "global_step12")["found"]
    assert "latest names global_step12" in of(checks, "pointer")["found"]
    assert "is torn" in of(checks, "ledger")["found"]
    for _ in range(3):
        choice = choose(run.save)
        assert choice is not None and choice.state is not None
        record_start(run.save, iteration=8, state=choice.state, choice=choice, topology=Topology(dp=2))
    status, checks = doctor(capsys, run.save)
    assert "3 starts from iteration 8, and no save" in of(checks, "progress")["found"]


def test_a_state_that_no_resume_can_read(run: SavedRun, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    path = step_path(run.save, 12, "global_step12")
    record = read_step_file(path)
    assert isinstance(record.state, StreamState)
    stages = [{"name": "stage 1", "from_samples": 900, "weights": {"web": 1}}]  # and none for the other source
    state = record.state.replace(config={**record.state.config, "stages": stages})
    write_step_file(path, replace(record, state=state))
    status, checks = doctor(capsys, run.save)
    assert status == 1 and "stages[0].weights leaves sources out" in of(checks, "data state")["found"]


def test_what_is_printed(tmp_path: Path) -> None:
    write_zero(tmp_path / "ckpt", 4)
    log = tmp_path / "log.txt"
    log.write_text("start\nOSError: [Errno 28] No space left on device\n")
    done = megaresume("doctor", tmp_path / "ckpt", "--log", log, "--log", log)
    assert done.returncode == 1 and done.stderr == ""
    for area in ("environment", "filesystem", "checkpoints", "log"):
        assert f"\n{area}\n" in "\n" + done.stdout
    assert "  PROBLEM  the disk is full:  log.txt line 2: OSError: [Errno 28] No space left on device" in done.stdout
    assert done.stdout.endswith("2 problems\n")
    done = megaresume("doctor")
    assert done.returncode == 0 and done.stdout.startswith("environment\n")


def test_a_read_only_directory_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There, even a file that is missing cannot be deleted."""

    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    write_zero(tmp_path, 4)
    monkeypatch.setattr("megaresume.runs.machine.leftover_name", lambda name: f"no such directory/{name}")
    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    assert main(["doctor", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().out
