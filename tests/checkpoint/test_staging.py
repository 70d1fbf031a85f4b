"""Two storages: copies that are proven, kills and errors in the middle of them, and what a start takes."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.checkpoint.copies.stager import Stager, adopt, read_staging, stage
from megaresume.checkpoint.load.choose import choose, choose_of_two
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.checkpoint.save.retention import KEEP_ALL, Retention, is_copied, prune
from megaresume.checkpoint.starts import record_start
from megaresume.stream.errors import CheckpointError
from megaresume.stream.state import StreamState
from tests.checkpoint.conftest import MODEL, save_checkpoint
from tests.checkpoint.durability import make_durable

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Three local checkpoints without checksums, and where they are to go."""
    local, shared = tmp_path / "local", tmp_path / "shared"
    for iteration in (10, 20, 30):
        save_checkpoint(local, iteration)
    return local, shared


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _wait_for(stager: Stager) -> None:
    _wait_until(lambda: not stager.waiting())


def test_a_copy_is_a_checkpoint(roots: tuple[Path, Path]) -> None:
    """What is copied stands alone: state, checksums, pointers, ledger; and the note tells of it."""
    local, shared = roots
    stager = Stager(local, shared)
    stager.start()
    assert stager.close(20) == ()
    here, there = choose(local), choose(shared, checksums=True)
    assert here is not None and there is not None and there.record == here.record and there.tag == "global_step30"
    assert there.manifest is not None and there.manifest.has_checksums and not there.rejected and not there.notes
    assert (shared / "megaresume/ledger.jsonl").read_bytes() == (local / "megaresume/ledger.jsonl").read_bytes()
    assert not list(shared.glob("megaresume/step*saving*"))
    note = read_staging(local)
    assert note is not None and note.to == shared and note.waiting == ()
    assert note.copied == ("global_step30", "global_step20", "global_step10")


def test_saves_are_copied_as_they_come(roots: tuple[Path, Path]) -> None:
    """`submit` returns at once; local ones stay until their copy is there, and go by the same rule then."""
    local, shared = roots
    stager = Stager(local, shared, Retention(keep_last=2))
    stager.start()
    save_checkpoint(local, 40)
    stager.submit(40, "global_step40")
    _wait_for(stager)
    assert stager.close(5) == ()
    for root in (local, shared):
        assert sorted(p.name for p in root.glob("global_step*")) == ["global_step30", "global_step40"]
    entries = read_ledger(shared / "megaresume/ledger.jsonl").entries
    assert [e.iteration for e in entries if e.kind == "checkpoint"] == [10, 20, 30, 40]


def test_what_is_not_copied_stays(roots: tuple[Path, Path]) -> None:
    """The shared storage is gone: loud, tried again, nothing local is deleted, and the training goes on."""
    local, shared = roots
    shared.write_text("a file where the mount should be")
    stager = Stager(local, shared, Retention(keep_last=1))
    stager.start()
    save_checkpoint(local, 40)
    stager.submit(40, "global_step40")
    time.sleep(0.2)
    assert len(list(local.glob("global_step*"))) == 4 and "global_step40" in stager.waiting()
    shared.unlink()  # the mount is back
    _wait_for(stager)
    assert stager.close(5) == ()
    assert [p.name for p in local.glob("global_step*")] == ["global_step40"]


def test_what_is_durable_only_after_its_copy_makes_room_at_the_end(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine copies faster than it forces files to the disk."""
    local, shared = roots
    later: list[Callable[[], object]] = []
    monkeypatch.setattr(
        "tests.checkpoint.conftest.make_durable",
        lambda *args, **more: later.append(functools.partial(make_durable, *args, **more)),
    )
    stager = Stager(local, shared, Retention(keep_last=2))
    stager.start()
    for iteration in (40, 50):
        save_checkpoint(local, iteration)
        stager.submit(iteration, f"global_step{iteration}")
    _wait_for(stager)
    assert len(list(local.glob("global_step*"))) == 4  # two durable ones, and two that may be lost
    for finish in later:
        finish()
    assert stager.close(5) == ()
    for root in (local, shared):
        assert sorted(p.name for p in root.glob("global_step*")) == ["global_step40", "global_step50"]


def test_errors_are_loud(roots: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    """What could not be copied is said with the reason, and again at the end, which comes in time."""
    local, shared = roots
    shared.write_text("")
    stager = Stager(local, shared)
    stager.start()
    assert stager.close(0.3) == ("global_step10", "global_step20", "global_step30")
    assert "global_step10 is not copied" in caplog.text and "not copied to" in caplog.text
    note = read_staging(local)
    assert note is not None and note.copied == () and len(note.waiting) == 3


def test_a_damaged_source_is_not_copied(tmp_path: Path) -> None:
    """A bit that flipped locally is found by the checksum of the save; the shared root stays without a manifest."""
    local, shared = tmp_path / "local", tmp_path / "shared"
    save_checkpoint(local, 10, checksums=True)
    model = local / "global_step10" / MODEL
    model.write_bytes(b"x" + model.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="is not what was saved"):
        stage(local, shared, 10, "global_step10")
    assert not is_copied(local, shared, 10, "global_step10")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        choose(shared)


def test_a_damaged_source_holds_nothing_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is named, and the saves after it are copied: of a lost machine, they are all that is left."""
    local, shared = tmp_path / "local", tmp_path / "shared"
    for iteration in (10, 20, 30):
        save_checkpoint(local, iteration, checksums=True)
    data = (local / "global_step10" / MODEL).read_bytes()
    (local / "global_step10" / MODEL).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    stager = Stager(local, shared)
    stager.start()
    assert stager.close(200) == ()
    assert [is_copied(local, shared, step, f"global_step{step}") for step in (10, 20, 30)] == [False, True, True]
    assert "global_step10 is not copied" in caplog.text and "is not what was saved" in caplog.text
    assert (choice := choose_of_two(tmp_path / "lost", shared)) is not None and choice.tag == "global_step30"


def test_the_newest_of_two(roots: tuple[Path, Path]) -> None:
    """Newer wins, the local one at a tie; the other one is named with the reason."""
    local, shared = roots
    stage(local, shared, 20, "global_step20")
    choice = choose_of_two(local, shared)
    assert choice is not None and (choice.load_dir, choice.tag) == (local, "global_step30")
    assert [str(r) for r in choice.rejected] == [
        f"global_step20: in {shared}: global_step30 in {local} is newer",
    ]
    stage(local, shared, 30, "global_step30")
    choice = choose_of_two(local, shared)
    assert choice is not None and choice.load_dir == local
    (local / "global_step30" / MODEL).unlink()
    choice = choose_of_two(local, shared)
    assert choice is not None and (choice.load_dir, choice.tag) == (shared, "global_step30")
    assert any("global_step20" in str(r) for r in choice.rejected)
    choice = choose_of_two(local, shared, tag="global_step10")
    assert choice is not None and (choice.load_dir, choice.tag) == (local, "global_step10")


def test_a_lost_local_disk(roots: tuple[Path, Path]) -> None:
    """A new node: the copy is taken, and the run stays the run, in both ledgers."""
    local, shared = roots
    stage(local, shared, 30, "global_step30")
    shutil.rmtree(local)
    choice = choose_of_two(local, shared)
    assert choice is not None and choice.load_dir == shared and choice.state is not None and choice.record is not None
    adopt(local, shared)
    entry = record_start(local, iteration=30, state=choice.state, choice=choice)
    assert entry.run == choice.record.run
    again = choose_of_two(local, shared)
    assert again is not None and again.load_dir == shared  # killed before its first save: the same once more
    save_checkpoint(local, 40)
    stage(local, shared, 40, "global_step40")
    kinds = [e.kind for e in read_ledger(shared / "megaresume/ledger.jsonl").entries if e.kind != "durable"]
    assert kinds == ["checkpoint"] * 3 + ["start", "checkpoint"]


def test_a_branch_that_was_given_up(roots: tuple[Path, Path]) -> None:
    """A run that went back and saved again is not overtaken by a copy of what it gave up."""
    local, shared = roots
    stage(local, shared, 30, "global_step30")
    chosen = choose(local, tag="global_step10")
    assert chosen is not None and chosen.state is not None
    record_start(local, iteration=10, state=chosen.state, choice=chosen)
    save_checkpoint(local, 15, salt=1)
    choice = choose_of_two(local, shared)
    assert choice is not None and (choice.load_dir, choice.tag) == (local, "global_step15")
    assert any("given up" in str(r) for r in choice.rejected)


def test_a_local_disk_lost_in_the_first_copy(tmp_path: Path) -> None:
    """Three checkpoints were saved and none was copied whole: no start from step 0, whether it looked or not."""
    local, shared = tmp_path / "local", tmp_path / "shared"
    for iteration in (10, 20, 30):
        save_checkpoint(local, iteration, checksums=True)
    model = local / "global_step10" / MODEL
    model.write_bytes(b"x" + model.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="is not what was saved"):
        stage(local, shared, 10, "global_step10")
    shutil.rmtree(local)
    with pytest.raises(CheckpointError, match="the run has saved checkpoints") as caught:
        choose_of_two(local, shared)
    assert "global_step30" in str(caught.value.found) and str(local) in str(caught.value.action)
    shared.rename(tmp_path / "aside")
    assert choose_of_two(local, shared) is None


def test_copies_know_of_a_run_that_has_not_saved(tmp_path: Path, state: Callable[..., StreamState]) -> None:
    """The node is lost before the first save: the next one is the same run, and says that it begins at step 0."""
    local, shared, other = tmp_path / "local", tmp_path / "shared", tmp_path / "other"
    first = record_start(local, iteration=0, state=state(0))
    stager = Stager(local, shared)
    stager.start()
    _wait_until((shared / "megaresume/ledger.jsonl").exists)
    assert stager.close(5) == ()
    assert choose_of_two(other, shared) is None
    words = adopt(other, shared)
    assert words is not None and "1 starts" in words and words.endswith("it begins at step 0")
    assert record_start(other, iteration=0, state=state(0)).run == first.run and adopt(other, shared) is None


def test_files_of_another_layout_leave_the_copy(roots: tuple[Path, Path]) -> None:
    """A step was copied in part, and is saved again by fewer ranks: the copy holds the files of its manifest alone."""
    local, shared = roots
    (shared / "global_step30").mkdir(parents=True)
    (shared / "global_step30" / "zero_pp_rank_3_mp_rank_00_optim_states.pt").write_bytes(b"of four ranks")
    stage(local, shared, 30, "global_step30")
    names = [sorted(path.name for path in (root / "global_step30").iterdir()) for root in roots]
    assert names[0] == names[1]


def test_two_runs(roots: tuple[Path, Path], tmp_path: Path) -> None:
    """Copies of another run are not mixed with these."""
    local, _ = roots
    save_checkpoint(tmp_path / "other", 90)
    with pytest.raises(CheckpointError, match="of two runs"):
        choose_of_two(local, tmp_path / "other")


#: LOCAL WORK: copies again and again, into WORK/N, killed at operation N; the last one comes to its end.
COPIES = """
import itertools, os, signal, sys
from pathlib import Path

from megaresume.checkpoint.copies.stager import stage

local, work = map(Path, sys.argv[1:])


def counted(function):
    def call(*args, **kwargs):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*args, **kwargs)

    return call


for operations in itertools.count():
    if (child := os.fork()) == 0:
        left = operations
        for name in ("open", "fsync", "replace", "unlink", "mkdir", "write"):
            setattr(os, name, counted(getattr(os, name)))
        for iteration in (10, 20, 30):
            stage(local, work / str(operations), iteration, f"global_step{iteration}")
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        print(status, operations)
        break
"""


@pytest.mark.process
def test_killed_at_every_file_operation(tmp_path: Path) -> None:
    """Wherever a copy is killed: what the shared root gives is a checkpoint as it was saved, or a refusal if anything
    is there at all; and going on ends as if nothing had happened.
    """
    local = tmp_path / "local"
    for iteration in (10, 20, 30):
        save_checkpoint(local, iteration)
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-c", COPIES, str(local), str(work)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    status, operations = map(int, done.stdout.split())
    assert status == 0 and operations > 60
    for k in range(operations):
        shared = work / str(k)
        record = _with_local_storage_lost(tmp_path / f"new-{k}", shared)
        assert record is None or record == _record_of(local, record.iteration)
        for iteration in (10, 20, 30):
            stage(local, shared, iteration, f"global_step{iteration}")
        found = choose(shared, checksums=True)
        assert found is not None and found.record == _record_of(local, 30) and not found.notes
        assert (shared / "megaresume/ledger.jsonl").read_bytes() == (local / "megaresume/ledger.jsonl").read_bytes()
        assert not list(shared.glob("megaresume/step*saving*"))


def _with_local_storage_lost(local: Path, shared: Path) -> StepFile | None:
    """What a start on another node takes; None: it is refused, or the copies know nothing and another run begins."""
    try:
        choice = choose_of_two(local, shared)
    except CheckpointError as error:
        assert "the run has saved checkpoints" in error.headline and str(shared) in str(error.action)
        return None
    if choice is None:
        assert not list(shared.glob("megaresume/[!.]*")) and not list(shared.glob("global_step*"))
        another = local.with_name(f"{local.name}-copies")
        shutil.copytree(shared, another) if shared.exists() else None
        save_checkpoint(local, 10)
        assert stage(local, another, 10, "global_step10") is not None
        return None
    assert choice.load_dir == shared
    return choice.record


def _record_of(root: Path, iteration: int) -> StepFile:
    choice = choose(root, tag=f"global_step{iteration}")
    assert choice is not None and choice.record is not None
    return choice.record


def test_a_shared_storage_that_damages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads back as other bytes than were written is no copy."""
    local, shared = tmp_path / "local", tmp_path / "shared"
    save_checkpoint(local, 10)

    def write_all(descriptor: int, data: memoryview) -> None:
        os.write(descriptor, bytes([data[0] ^ 1]) + bytes(data[1:]))

    with monkeypatch.context() as context, pytest.raises(CheckpointError, match="reads back other bytes"):
        context.setattr("megaresume.checkpoint.records.manifest.write_all", write_all)
        stage(local, shared, 10, "global_step10")
    assert not is_copied(local, shared, 10, "global_step10")
    assert stage(local, shared, 10, "global_step10") is not None and choose(shared, checksums=True) is not None


def test_local_ones_go_behind_their_copies(roots: tuple[Path, Path]) -> None:
    """What a rule would delete stays while its copy is missing, or was begun and not completed, or lost a file."""
    local, shared = roots
    record = stage(local, shared, 10, "global_step10")
    assert record is not None and prune(local, Retention(keep_last=1), _record_of(local, 30), copied_to=shared) == (
        "global_step10",
    )
    stage(local, shared, 20, "global_step20")
    (shared / "global_step20" / MODEL).unlink()
    assert prune(local, Retention(keep_last=1), _record_of(local, 30), copied_to=shared) == ()
    stage(local, shared, 20, "global_step20")
    assert prune(local, Retention(keep_last=1), _record_of(local, 30), copied_to=shared) == ("global_step20",)


def test_pointers_never_go_back(roots: tuple[Path, Path]) -> None:
    """An older one that is copied late moves no pointer; a run that went back does."""
    local, shared = roots
    stage(local, shared, 30, "global_step30")
    stage(local, shared, 10, "global_step10")
    assert (shared / "latest").read_text() == "global_step30"
    save_checkpoint(local, 15)
    stage(local, shared, 15, "global_step15")
    assert (shared / "latest").read_text() == "global_step15"
    assert (shared / "latest_checkpointed_iteration.txt").read_text() == "15"


def test_a_save_behind_the_end(roots: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    """It is complete where it was saved, and the next start copies it."""
    local, shared = roots
    stager = Stager(local, shared)
    stager.start()
    stager.close(20)
    save_checkpoint(local, 40)
    stager.submit(40, "global_step40")
    assert "the next start copies it" in caplog.text
    again = Stager(local, shared)
    again.start()
    assert again.close(20) == () and is_copied(local, shared, 40, "global_step40")


def test_retention_without_rules(roots: tuple[Path, Path]) -> None:
    local, shared = roots
    stager = Stager(local, shared, KEEP_ALL)
    stager.start()
    assert stager.close(20) == () and len(list(local.glob("global_step*"))) == 3
