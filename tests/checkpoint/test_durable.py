"""From complete to durable: what a start takes after a kill, after a power cut, and after a disk that failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.checkpoint import Commit, begin_save, choose, commit_save, read_ledger, system
from megaresume.checkpoint.manifest import Manifest, read_manifest
from megaresume.checkpoint.saving import durable
from megaresume.checkpoint.saving.durable import finish, force, make_durable, not_durable, read_part, write_part
from megaresume.checkpoint.saving.older import make_room, put_back
from megaresume.session.durability import Durability
from megaresume.stream.errors import CheckpointError
from megaresume.stream.state import StreamState

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
    asked = choose(root, iteration=40)  # on purpose: with a note
    assert asked is not None and asked.state is not None and "may hold anything" in asked.notes[0]
    monkeypatch.undo()
    make_durable(root, complete)
    reboot(monkeypatch)
    assert taken(root) == 40


def test_every_machine_that_wrote_it_must_be_up(
    root: Path, state: MakeState, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = begin_save(root, tag="global_step40", iteration=40, state=state(320))
    model(pending.tag_dir, state(320))
    commit_save(pending, boots=[system.boot_id(), "of another node"])
    assert taken(root) == 30
    monkeypatch.setattr(system, "_up", {"of another node"})
    assert taken(root) == 40


def test_a_file_that_cannot_be_forced_makes_it_worthless(
    root: Path, complete: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again, the system would say that all is well."""

    def fails(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable, "fsync_file", fails)
    with pytest.raises(CheckpointError, match="could not be forced"):
        make_durable(root, complete)
    monkeypatch.undo()
    assert taken(root) == 30
    assert not_durable(root) == ()


def test_two_machines(root: Path, complete: Manifest) -> None:
    mine, its = (entry.path for entry in complete.files)
    assert read_part(root, complete, 1) is None
    write_part(root, complete, 1, force(root, complete, [its]))
    part = read_part(root, complete, 1)
    assert part is not None and list(part) == [its]
    finish(root, complete, force(root, complete, [mine]) | part)
    assert read_manifest(root / "megaresume" / "step_0000040.manifest.json").has_checksums
    assert not (root / "megaresume" / "step_0000040.synced").exists()
    write_part(root, complete, 1, {}, error="disk full")
    with pytest.raises(durable.NotForcedError, match="disk full"):
        read_part(root, complete, 1)


def test_saved_again_meanwhile(root: Path, complete: Manifest, save: Save) -> None:
    sums = force(root, complete, (entry.path for entry in complete.files))
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
    work.submit(root, iteration=40, tag="global_step40", save_id=complete.save_id)
    work.submit(root, iteration=40, tag="global_step40", save_id="of a save that failed")
    work.wait_for(root, "global_step40")
    ledger.rmdir()
    ledger.write_bytes(content)
    work.close()
    assert not_durable(root) == () and taken(root) == 40
