"""Which checkpoints are deleted, which never, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume import files
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.candidates import examine, list_candidates
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.save import retention as module
from megaresume.checkpoint.save.commit import Commit, begin_save, commit_save
from megaresume.checkpoint.save.retention import Retention
from megaresume.checkpoint.starts import record_start
from megaresume.stream.errors import UsageError
from megaresume.stream.state import StreamState
from tests.checkpoint.durability import make_durable

Save = Callable[..., Commit]
MakeState = Callable[..., StreamState]


def weights(root: Path) -> list[str]:
    """Tag directories by iteration, when the deleting threads are done."""
    for thread in threading.enumerate():
        if thread.name == "megaresume-delete":
            thread.join()
    return [c.tag for c in reversed(list_candidates(root)) if c.has_dir]


def tags(*iterations: int) -> list[str]:
    return [f"global_step{n}" for n in iterations]


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (Retention(), (10, 20, 30, 40, 50)),
        (Retention(keep_last=2), (40, 50)),
        (Retention(keep_last=1), (50,)),
        (Retention(keep_last=9), (10, 20, 30, 40, 50)),
        (Retention(keep_every=20), (20, 40, 50)),
        (Retention(keep_last=2, keep_every=20), (20, 40, 50)),
        (Retention(keep_last=3, keep_every=25), (30, 40, 50)),
    ],
)
def test_rules(tmp_path: Path, save: Save, policy: Retention, left: tuple[int, ...]) -> None:
    for iteration in (10, 20, 30, 40, 50):
        save(tmp_path, iteration, retention=policy)
    assert weights(tmp_path) == tags(*left)
    # what is left loads, and what is gone is remembered
    choice = choose(tmp_path)
    assert choice is not None and choice.tag == "global_step50"
    entries = read_ledger(tmp_path / "megaresume" / "ledger.jsonl").entries
    assert [(e.kind, e.iteration) for e in entries] == [
        (kind, iteration) for iteration in (10, 20, 30, 40, 50) for kind in ("checkpoint", "durable")
    ]
    assert [c.iteration for c in list_candidates(tmp_path) if "state" in c.records] == [50, 40, 30, 20, 10]
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_a_commit_says_what_is_gone(tmp_path: Path, save: Save) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    record = save(tmp_path, 40).record
    assert module.prune(tmp_path, Retention(keep_last=2), record) == ("global_step20", "global_step10")


def test_nothing_goes_for_one_that_is_not_durable(tmp_path: Path, save: Save, state: MakeState) -> None:
    for iteration in (10, 20):
        save(tmp_path, iteration)
    pending = begin_save(tmp_path, tag="global_step30", iteration=30, state=state(240))
    pending.tag_dir.mkdir()
    (pending.tag_dir / "model.pt").write_bytes(b"weights")
    commit = commit_save(pending)
    assert module.prune(tmp_path, Retention(keep_last=1), commit.record) == ("global_step10",)
    assert make_durable(tmp_path, commit.manifest, retention=Retention(keep_last=1)) == ("global_step20",)
    assert weights(tmp_path) == tags(30)


def test_what_is_never_deleted(tmp_path: Path, save: Save, state: MakeState) -> None:
    for iteration in (10, 20, 30, 40, 50, 60):
        save(tmp_path, iteration)
    (tmp_path / "global_step10" / "mp_rank_00_model_states.pt").write_bytes(b"cut")  # damaged
    begin_save(tmp_path, tag="global_step20", iteration=20, state=state(160))  # in flight
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    os.rename(tmp_path / "global_step30", elsewhere)
    (tmp_path / "global_step30").symlink_to(elsewhere)  # a link
    save(tmp_path, 45, tag="best")  # a name of one's own
    (tmp_path / "latest").write_text("global_step40")  # moved back by hand
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "model.pt").write_bytes(b"not ours")
    (tmp_path / "notes").mkdir()
    # saved by a run that went back to 40: 50 and 60 are ahead of it
    save(tmp_path, 48, retention=Retention(keep_last=1), latest=False)
    assert weights(tmp_path) == [*tags(5, 10, 20, 30, 40), "best", *tags(48, 50, 60)]
    assert (tmp_path / "notes").is_dir() and len(os.listdir(elsewhere)) == 2


def test_damaged_ones_do_not_count(tmp_path: Path, save: Save) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    (tmp_path / "global_step30" / "mp_rank_00_model_states.pt").unlink()
    save(tmp_path, 40, retention=Retention(keep_last=2))
    assert weights(tmp_path) == tags(20, 30, 40)


def test_a_branch_that_was_given_up_pushes_nothing_out(tmp_path: Path, save: Save) -> None:
    for iteration in (10, 20, 30, 40):
        save(tmp_path, iteration)
    choice = choose(tmp_path, tag="global_step10")
    assert choice is not None and choice.state is not None
    record_start(tmp_path, iteration=10, state=choice.state, choice=choice)
    for iteration in (25, 45):  # 20, 30 and 40 lie behind it now, and do not lead to 45
        save(tmp_path, iteration, salt=1, retention=Retention(keep_last=2))
    assert weights(tmp_path) == tags(25, 30, 40, 45)
    save(tmp_path, 55, salt=1, retention=Retention(keep_last=2))
    assert weights(tmp_path) == tags(45, 55)
    (tmp_path / "global_step55" / "mp_rank_00_model_states.pt").unlink()
    choice = choose(tmp_path)
    assert choice is not None and choice.tag == "global_step45"


def test_another_run_is_left_alone(tmp_path: Path, save: Save) -> None:
    other, root = tmp_path / "other", tmp_path / "root"
    save(other, 10)
    save(root, 20)
    os.rename(other / "global_step10", root / "global_step10")
    for name in ("step_0000010.json", "step_0000010.manifest.json"):
        os.rename(other / "megaresume" / name, root / "megaresume" / name)
    save(root, 30, retention=Retention(keep_last=1))
    assert weights(root) == tags(10, 30)


def test_a_program_waits_at_its_end_for_what_is_being_deleted(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rule a daemon makes checkpoints durable, and whatever it starts is one."""
    is_over, delete = threading.Event(), files._delete
    monkeypatch.setattr(files, "_delete", lambda places: is_over.wait() and delete(places))
    save(tmp_path, 10)
    saver = threading.Thread(
        target=save, args=(tmp_path, 20), kwargs={"retention": Retention(keep_last=1)}, daemon=True
    )
    saver.start()
    saver.join()
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "megaresume-delete"] == [False]
    is_over.set()
    assert weights(tmp_path) == tags(20)


@pytest.mark.process
def test_a_kill_in_the_middle_of_deleting(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(files, "_delete", lambda _directories: os.kill(os.getpid(), signal.SIGKILL))
        save(tmp_path, 30, retention=Retention(keep_last=1))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert sum(name.endswith(".tmp") for name in os.listdir(tmp_path)) == 2
    assert weights(tmp_path) == tags(30)
    choice = choose(tmp_path)
    assert choice is not None and choice.state is not None and (choice.tag, choice.rejected) == ("global_step30", ())
    record_start(tmp_path, iteration=30, state=choice.state, choice=choice)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_what_cannot_be_deleted_fails_nothing(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 10)

    def refuse(*_: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(module.os, "rename", refuse)
    save(tmp_path, 20, retention=Retention(keep_last=1))
    assert "global_step10" in caplog.text and "Permission denied" in caplog.text
    monkeypatch.undo()
    assert weights(tmp_path) == tags(10, 20)
    assert all(examine(tmp_path, c).status == "complete" for c in list_candidates(tmp_path))


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_every": -5}])
def test_impossible_policies(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        Retention(**wrong)
