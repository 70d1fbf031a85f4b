"""From complete to durable: what a start takes after a kill, after a power cut, and after a disk that failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.checkpoint import system
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records import manifest as manifests
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.manifest import Manifest, read_manifest
from megaresume.checkpoint.records.names import Saved
from megaresume.checkpoint.save import durability, forcing
from megaresume.checkpoint.save.commit import Commit, begin_save, commit_save
from megaresume.checkpoint.save.durability import Durability
from megaresume.checkpoint.save.forcing import (
    NodePart,
    finish,
    force,
    not_durable,
    note_checksums,
    read_part,
    take_checksums,
    write_part,
)
from megaresume.checkpoint.save.retention import make_room, put_back, remove_older
from megaresume.stream.errors import CheckpointError
from megaresume.stream.state import StreamState
from tests.checkpoint.durability import make_durable

Save = Callable[..., Commit]
MakeState = Callable[..., StreamState]
Model = Callable[[Path, StreamState], None]


@pytest.fixture
def complete(root: Path, state: MakeState, model: Model) -> Manifest:
    """Step 40 is complete and not durable; 10, 20 and 30 are."""
    pending = begin_save(root, tag="global_step40", iteration=40, state=state(320))
    model(pending.tag_dir, state(320))
    return commit_save(pending).manifest


def taken(root: Path) -> int | None:
    choice = choose(root)
    assert choice is not None
    return choice.iteration


def reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "boot_id", lambda: "another boot")


def test_a_kill_before_it_is_durable_costs_nothing(root: Path, complete: Manifest) -> None:
    assert not complete.durable and complete.boots == (system.boot_id(),)
    assert taken(root) == 40
    (left,) = not_durable(root)
    assert left == complete
    make_durable(root, left)
    assert not_durable(root) == ()
    manifest = read_manifest(root / "megaresume" / "step_0000040.manifest.json")
    assert manifest.durable and manifest.has_checksums and manifest.save_id == complete.save_id
    assert read_ledger(root / "megaresume" / "ledger.jsonl").entries[-1].kind == "durable"


def test_after_a_restart_of_the_machine_only_durable_ones_count(
    root: Path, complete: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    reboot(monkeypatch)
    choice = choose(root)
    assert choice is not None and choice.iteration == 30
    assert "went down" in choice.rejected[0].reason
    assert not_durable(root) == ()
    asked = choose(root, tag="global_step40")  # on purpose: with a note
    assert asked is not None and asked.state is not None and "may hold anything" in asked.notes[0]
    monkeypatch.undo()
    make_durable(root, complete)
    reboot(monkeypatch)
    assert taken(root) == 40


def test_every_machine_that_wrote_it_must_be_up(
    root: Path, state: MakeState, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots = [system.boot_id(), "of another node"]
    pending = begin_save(root, tag="global_step40", iteration=40, state=state(320), boots=boots)
    model(pending.tag_dir, state(320))
    commit_save(pending)
    assert taken(root) == 30
    monkeypatch.setattr(system, "_up", {"of another node"})
    assert taken(root) == 40


def sums_of(root: Path, manifest: Manifest) -> dict[str, str | None]:
    return take_checksums(root, manifest, (entry.path for entry in manifest.files))


def test_before_it_is_durable_checksums_tell(root: Path, complete: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart of the machine, too: what reached the disk as it was saved counts."""
    note_checksums(root, complete, sums_of(root, complete))
    reboot(monkeypatch)
    assert taken(root) == 40
    path = root / "global_step40" / complete.files[0].path
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    choice = choose(root)
    assert choice is not None and choice.iteration == 30 and "checksum is" in choice.rejected[0].reason
    assert not_durable(root) == ()
    path.write_bytes(content)
    (left,) = not_durable(root)
    make_durable(root, left)
    assert taken(root) == 40 and not_durable(root) == ()


class Disk:
    """Where forcing a file with this in its name fails so often. Asked again, Linux says that all is well."""

    def __init__(self, name: str, times: int = 1) -> None:
        self.name, self.times, self.lost = name, times, set[int]()

    def fsync(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        if self.times and os.readlink(f"/proc/self/fd/{descriptor}").count(self.name):
            self.times -= 1
            self.lost.add(stat.st_ino)
            raise OSError(5, "Input/output error")


@pytest.mark.parametrize("times", [1, 2])
def test_a_file_that_could_not_be_forced_is_written_again(
    root: Path, complete: Manifest, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A checkpoint that is complete is not lost with a moment of the disk's. What was lost is not called durable."""
    name = complete.files[0].path
    disk = Disk(name, times)
    for module in (forcing, manifests):
        monkeypatch.setattr(module, "fsync_file", disk.fsync)
    work = Durability(checksums=True)
    work.submit(root, complete.saved)
    work.wait_for(root, "global_step40")
    before = read_manifest(root / "megaresume" / "step_0000040.manifest.json")
    assert not before.durable and not before.boots and before.has_checksums and taken(root) == 40
    work.close()
    assert not_durable(root) == () and taken(root) == 40
    assert (root / "global_step40" / name).stat().st_ino not in disk.lost
    manifest = read_manifest(root / "megaresume" / "step_0000040.manifest.json")
    assert manifest.durable and manifest.verify(root / "global_step40", mode="checksums") == []


def test_what_could_not_be_forced_and_is_gone_from_memory_is_not_loaded(
    root: Path, complete: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "global_step40" / complete.files[0].path
    monkeypatch.setattr(forcing, "fsync_file", Disk(path.name).fsync)
    with pytest.raises(CheckpointError, match="could not be forced"):
        make_durable(root, complete)
    monkeypatch.undo()
    (left,) = not_durable(root)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CheckpointError, match="could not be forced") as caught:
        make_durable(root, left)
    assert "memory no longer holds it" in str(caught.value.found)
    assert taken(root) == 30 and not_durable(root) == ()


def test_without_checksums_a_file_that_cannot_be_forced_makes_it_worthless(
    root: Path, complete: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forcing, "fsync_file", Disk(complete.files[0].path).fsync)
    with pytest.raises(CheckpointError, match="could not be forced"):
        make_durable(root, complete, checksums=False)
    assert taken(root) == 30 and not_durable(root) == ()


def test_two_machines(root: Path, complete: Manifest) -> None:
    mine, its = (entry.path for entry in complete.files)
    assert read_part(root, complete, 1) is None
    part = NodePart(checksums=take_checksums(root, complete, [its]), is_forced=False, error="disk full")
    write_part(root, complete, 1, part)
    assert read_part(root, complete, 1) == part
    first, work = Durability(checksums=True), _work(root, complete, machines=2)
    assert not first._advance(work)
    manifest_file = root / "megaresume" / "step_0000040.manifest.json"
    manifest = read_manifest(manifest_file)
    assert manifest.has_checksums and not manifest.boots and not manifest.durable
    force(root, complete, [its])
    write_part(root, complete, 1, NodePart(checksums=part.checksums, is_forced=True))
    assert first._advance(work)
    manifest = read_manifest(manifest_file)
    assert manifest.durable and manifest.verify(root / "global_step40", mode="checksums") == []
    assert not (root / "megaresume" / "step_0000040.synced").exists() and mine != its


def _work(root: Path, manifest: Manifest, *, machines: int) -> durability._Work:
    owners = {entry.path: number for number, entry in enumerate(manifest.files)}
    return durability._Work(
        root=root,
        saved=manifest.saved,
        machine=0,
        machines=machines,
        owners=owners,
    )


def test_saved_again_meanwhile(root: Path, complete: Manifest, save: Save) -> None:
    sums = sums_of(root, complete)
    again = save(root, 40, salt=1)
    finish(root, complete, sums)
    manifest = read_manifest(root / "megaresume" / "step_0000040.manifest.json")
    assert manifest.save_id == again.manifest.save_id and manifest.durable


def test_the_older_save_stays_until_the_newer_one_is_durable(
    root: Path, state: MakeState, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_room(root, 30, "global_step30")
    pending = begin_save(root, tag="global_step30", iteration=30, state=state(240, salt=1))
    model(pending.tag_dir, state(240, salt=1))
    commit = commit_save(pending)
    older = root / ".step_0000030@global_step30.older"
    assert put_back(root) == () and older.is_dir()
    reboot(monkeypatch)
    assert put_back(root) == ("global_step30",)
    choice = choose(root)
    assert choice is not None and choice.state == state(240) and not older.exists()
    assert choice.manifest is not None and choice.manifest.save_id != commit.manifest.save_id


def test_two_threads_remove_the_older_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That which finds the newer one durable, and a load at the same moment."""
    make_room(root, 30, "global_step30")
    older = root / ".step_0000030@global_step30.older"
    assert older.is_dir()
    rename = os.rename

    def renamed(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        remove_older(root, 30, "global_step30")
        rename(source, target)

    monkeypatch.setattr(os, "rename", renamed)
    remove_older(root, 30, "global_step30")
    assert not older.exists()


def test_without_checksums(root: Path, complete: Manifest) -> None:
    make_durable(root, complete, checksums=False)
    manifest = read_manifest(root / "megaresume" / "step_0000040.manifest.json")
    assert manifest.durable and not manifest.has_checksums


def test_the_boot_of_this_machine_is_known() -> None:
    assert os.path.exists("/proc/sys/kernel/random/boot_id") == bool(system.boot_id())


def test_a_disk_that_refuses_holds_up_no_save_of_the_same_step(root: Path, complete: Manifest) -> None:
    """Nor does a save that was never committed. What could not be done is done when the disk is well again."""
    ledger = root / "megaresume" / "ledger.jsonl"
    content = ledger.read_bytes()
    ledger.unlink()
    ledger.mkdir()
    work = Durability(checksums=True)
    work.submit(root, complete.saved)
    work.submit(root, Saved(iteration=40, tag="global_step40", save_id="of a save that failed"))
    work.wait_for(root, "global_step40")
    ledger.rmdir()
    ledger.write_bytes(content)
    work.close()
    assert not_durable(root) == () and taken(root) == 40


def test_a_later_save_does_not_give_up_an_earlier_one(
    root: Path, complete: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two saves in the background: the first one is committed long after the second one began."""
    monkeypatch.setattr(durability, "PATIENCE_FOR_COMMIT", 0.0)
    path, work = root / "megaresume" / "step_0000040.manifest.json", Durability(checksums=True)
    content = path.read_bytes()
    path.unlink()
    work.submit(root, complete.saved)
    work.submit(root, Saved(iteration=50, tag="global_step50", save_id="of a save that goes on"))
    first, second = work._queue
    assert not work._advance(first) and not work._advance(second)
    path.write_bytes(content)
    work.wait_for(root, "global_step50")
    work.close()
    assert not_durable(root) == () and taken(root) == 40


def test_the_end_does_not_wait_for_a_save_that_was_not_committed(
    root: Path, complete: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    """An error comes while it is being written. It is not complete, and nobody says so."""
    never = Saved(iteration=50, tag="global_step50", save_id="of a save that does not end")
    work = Durability(checksums=True)
    work.submit(root, complete.saved)
    work.submit(root, never)
    work._at_exit()
    assert not_durable(root) == () and not caplog.records
    work.submit(root, never)
    work._close(0.0)
    assert "complete" not in caplog.text


def test_a_record_that_is_gone_for_a_moment_is_no_pruned_checkpoint(
    root: Path, complete: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        monkeypatch.undo()
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(durability, "note_checksums", gone)
    work = Durability(checksums=True)
    work.submit(root, complete.saved)
    work.close()
    assert not_durable(root) == () and taken(root) == 40


def test_nobody_waits_for_a_file_that_was_deleted(
    root: Path, complete: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    """Not on the machine that wrote it, and not on that of rank 0."""
    mine, its = (entry.path for entry in complete.files)
    (root / "global_step40" / its).unlink()
    other, work = Durability(checksums=True), _work(root, complete, machines=2)
    work.machine = 1
    assert other._advance(work)
    part = read_part(root, complete, 1)
    assert part is not None and part.is_gone and its in part.error and mine not in part.error
    assert Durability(checksums=True)._advance(_work(root, complete, machines=2))
    assert its in caplog.text and taken(root) == 30


def test_a_directory_that_was_made_again_is_another_one(tmp_path: Path) -> None:
    (directory := tmp_path / "global_step10").mkdir()
    before = system.identity_of(directory)
    directory.rename(tmp_path / "aside")
    directory.mkdir()
    assert system.identity_of(directory) != before == system.identity_of(tmp_path / "aside")
