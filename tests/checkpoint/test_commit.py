from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint import system
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.manifest import FileEntry, checksum_files, read_manifest
from megaresume.checkpoint.records.names import manifest_path
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.checkpoint.save.commit import Commit, abandon_save, begin_save, commit_save
from megaresume.checkpoint.starts import distrust_tracker, record_start
from megaresume.checkpoint.system import Topology
from megaresume.stream.errors import CheckpointError, UsageError
from megaresume.stream.state import StreamState

FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")

Save = Callable[..., Commit]
MakeState = Callable[..., StreamState]
Model = Callable[[Path, StreamState], None]


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_commit_writes_everything(tmp_path: Path, save: Save, state: MakeState) -> None:
    commit = save(tmp_path, 10)
    records = tmp_path / "megaresume"
    assert sorted(os.listdir(tmp_path)) == [
        "global_step10",
        "latest",
        "latest_checkpointed_iteration.txt",
        "megaresume",
    ]
    assert sorted(os.listdir(records)) == ["ledger.jsonl", "step_0000010.json", "step_0000010.manifest.json"]
    assert (tmp_path / "latest").read_text() == "global_step10"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert read_step_file(records / "step_0000010.json") == commit.record
    assert commit.record.state == state(80)
    assert read_manifest(records / "step_0000010.manifest.json").save_id == commit.manifest.save_id
    assert [(f.path, f.size) for f in commit.manifest.files] == [(name, 1024) for name in FILES]
    entry, durable = read_ledger(records / "ledger.jsonl").entries
    assert (durable.kind, durable.details) == ("durable", {"save_id": commit.record.save_id})
    assert (entry.kind, entry.iteration, entry.tag) == ("checkpoint", 10, "global_step10")
    assert (entry.samples, entry.digest, entry.run) == (80, state(80).digest, commit.record.run)
    assert entry.topology == Topology(dp=2, num_workers=2, global_batch_size=8)
    assert entry.details["bytes"] == 2048
    assert entry.details["save_seconds"] >= 0


def test_all_checkpoints_of_a_root_are_of_one_run(root: Path, save: Save) -> None:
    commits = [save(root, 40), save(root, 50)]
    (root / "megaresume" / "ledger.jsonl").unlink()
    commits.append(save(root, 60))
    assert len({commit.record.run for commit in commits}) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / FILES[1]).unlink(), f"{FILES[1]} is missing"),
        (lambda d: (d / FILES[1]).write_bytes(b""), f"{FILES[1]} has 0 bytes"),
        (lambda d: shutil.rmtree(d), f"{FILES[0]} is missing, {FILES[1]} is missing"),
    ],
)
def test_an_incomplete_checkpoint_is_refused_and_the_pointers_stay(
    root: Path, state: MakeState, model: Model, damage: Callable[[Path], None], words: str
) -> None:
    pending = begin_save(root, tag="global_step40", iteration=40, state=state(320))
    model(pending.tag_dir, state(320))
    damage(pending.tag_dir)
    before = snapshot(root)
    with pytest.raises(CheckpointError, match="is incomplete and was not committed") as caught:
        commit_save(pending, expected_files=FILES)
    assert words in str(caught.value.found)
    assert snapshot(root) == before
    choice = choose(root)
    assert choice is not None
    assert choice.iteration == 30
    expected = ["global_step40"] if pending.tag_dir.exists() else []
    assert [rejected.tag for rejected in choice.rejected] == expected


def test_many_missing_files_are_counted(root: Path, state: MakeState, model: Model) -> None:
    pending = begin_save(root, tag="global_step40", iteration=40, state=state(320))
    model(pending.tag_dir, state(320))
    with pytest.raises(CheckpointError) as caught:
        commit_save(pending, expected_files=[f"rank_{n}.pt" for n in range(64)])
    assert "and 54 more" in str(caught.value.found)


def test_without_expectations_something_must_be_there(tmp_path: Path, state: MakeState) -> None:
    pending = begin_save(tmp_path, tag="global_step1", iteration=1, state=state(8))
    pending.tag_dir.mkdir()
    with pytest.raises(CheckpointError, match="not committed"):
        commit_save(pending)
    (pending.tag_dir / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="not committed"):
        commit_save(pending)
    (pending.tag_dir / "model.pt").write_bytes(b"weights")
    assert commit_save(pending).manifest.size == 7


@pytest.mark.parametrize(("most", "summed"), [(0, 0), (2047, 1), (2048, 2)])
def test_checksums_of_small_files_are_in_the_commit(
    most: int, summed: int, tmp_path: Path, state: MakeState, model: Model
) -> None:
    pending = begin_save(tmp_path, tag="global_step10", iteration=10, state=state(80))
    model(pending.tag_dir, state(80))
    manifest = commit_save(pending, expected_files=FILES, sum_bytes=most).manifest
    sums = {entry.path: entry.checksum for entry in manifest.files if entry.checksum is not None}
    assert len(sums) == summed and sums.items() <= checksum_files(pending.tag_dir, FILES).items()
    assert read_manifest(manifest_path(tmp_path, 10, "global_step10")).files == manifest.files


def test_values_are_those_of_the_beginning(tmp_path: Path, state: MakeState, model: Model) -> None:
    """An asynchronous save: training goes on, the finalizer commits later, perhaps in another process."""
    trained = state(80)
    pending = begin_save(tmp_path, tag="iter_0000010", iteration=10, state=trained)
    model(pending.tag_dir, trained)
    trained = trained.replace(samples=96, digest="f" * 16)
    commit_save(pickle.loads(pickle.dumps(pending)), expected_files=FILES)
    choice = choose(tmp_path)
    assert choice is not None
    assert (choice.iteration, choice.state) == (10, state(80))
    assert (tmp_path / "latest").read_text() == "iter_0000010"
    with pytest.raises(dataclasses.FrozenInstanceError):
        pending.began = 0.0  # type: ignore[misc]


def test_two_saves_in_flight(tmp_path: Path, state: MakeState, model: Model) -> None:
    first = begin_save(tmp_path, tag="global_step10", iteration=10, state=state(80))
    model(first.tag_dir, state(80))
    second = begin_save(tmp_path, tag="global_step20", iteration=20, state=state(160))
    model(second.tag_dir, state(160))
    commit_save(first)
    assert (tmp_path / "latest").read_text() == "global_step10"
    commit_save(second)
    choice = choose(tmp_path)
    assert choice is not None
    assert choice.iteration == 20


def test_only_the_pointers_that_are_asked_for_move(tmp_path: Path, save: Save) -> None:
    save(tmp_path, 10, tracker=False)
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()
    save(tmp_path, 20, tag="iter_0000020", latest=False)
    assert (tmp_path / "latest").read_text() == "global_step10"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "20"


def test_other_data_at_the_same_step_never_vanishes_silently(root: Path, save: Save, state: MakeState) -> None:
    commit = save(root, 20, salt=5)
    (note,) = commit.notes
    assert state(160).digest in note
    assert state(160, salt=5).digest in note
    old = root / "megaresume" / "superseded" / f"step_0000020.{state(160).digest}.json"
    assert read_step_file(old).state == state(160)
    assert read_step_file(root / "megaresume" / "step_0000020.json").state == state(160, salt=5)
    assert read_ledger(root / "megaresume" / "ledger.jsonl").entries[-2].details["notes"] == [note]


def test_the_same_data_at_the_same_step_is_no_news(root: Path, save: Save) -> None:
    assert save(root, 20).notes == ()
    assert not (root / "megaresume" / "superseded").exists()


def test_an_unreadable_old_state_is_kept_too(root: Path, save: Save) -> None:
    (root / "megaresume" / "step_0000020.json").write_bytes(b"garbage")
    assert "an unreadable state" in save(root, 20).notes[0]
    assert (root / "megaresume" / "superseded" / "step_0000020.unreadable.json").read_bytes() == b"garbage"


def test_a_save_that_was_overtaken_is_not_committed(tmp_path: Path, state: MakeState, model: Model) -> None:
    first = begin_save(tmp_path, tag="global_step10", iteration=10, state=state(80))
    model(first.tag_dir, state(80))
    second = begin_save(tmp_path, tag="global_step10", iteration=10, state=state(80, salt=1))
    with pytest.raises(CheckpointError, match="another save of global_step10 has begun"):
        commit_save(first)
    model(second.tag_dir, state(80, salt=1))
    commit_save(second)
    with pytest.raises(CheckpointError, match="another save of global_step10 has begun or ended"):
        commit_save(second)


def test_a_full_disk_is_named_and_the_old_checkpoint_stays(
    root: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def write(descriptor: int, data: Any) -> int:
        if b"manifest" in bytes(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(CheckpointError, match="the disk is full"):
            save(root, 40)
    choice = choose(root)
    assert choice is not None
    assert choice.iteration == 30
    assert save(root, 50).record.iteration == 50


@pytest.mark.parametrize(("tag", "iteration"), [("../x", 1), ("latest", 1), ("global_step1", -1)])
def test_bad_usage(tmp_path: Path, state: MakeState, tag: str, iteration: int) -> None:
    with pytest.raises(UsageError):
        begin_save(tmp_path, tag=tag, iteration=iteration, state=state(8))
    assert not list(tmp_path.iterdir())


def test_a_start_is_recorded(root: Path, state: MakeState) -> None:
    choice = choose(root)
    entry = record_start(root, iteration=30, state=state(240), choice=choice, topology=Topology(dp=4))
    reading = read_ledger(root / "megaresume" / "ledger.jsonl")
    assert reading.entries[-1] == entry
    assert (entry.kind, entry.tag, entry.run) == ("start", "global_step30", reading.run)
    assert "loaded_from" not in entry.details


def test_a_start_into_another_directory_is_another_run(root: Path, tmp_path: Path, state: MakeState) -> None:
    choice = choose(root)
    entry = record_start(tmp_path / "branch", iteration=30, state=state(240), choice=choice)
    assert choice is not None
    assert choice.record is not None
    assert entry.run != choice.record.run
    assert entry.details["loaded_from"] == {"digest": state(240).digest, "run": choice.record.run}


def test_a_start_clears_leftovers(root: Path, state: MakeState) -> None:
    leftover = root / "megaresume" / ".step_0000040.json.megaresume-1-00000000.tmp"
    leftover.write_bytes(b"half")
    record_start(root, iteration=30, state=state(240), choice=choose(root))
    assert not leftover.exists()


def _in_megatron(root: Path, model: Model, state: MakeState, *iterations: int) -> None:
    """Saves whose files are there and which Megatron's tracker names, and no commit."""
    for iteration in iterations:
        pending = begin_save(root, tag=f"iter_{iteration:07d}", iteration=iteration, state=state(8 * iteration))
        model(pending.tag_dir, state(8 * iteration))
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def test_a_tracker_that_no_commit_followed(
    tmp_path: Path, save: Save, state: MakeState, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is believed as long as the machine is up: what a power cut has torn has its size all the same."""
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    save(tmp_path, 10, tag="iter_0000010")
    _in_megatron(tmp_path, model, state, 20)
    assert distrust_tracker(tmp_path) is None and tracker.read_text() == "20"
    monkeypatch.setattr(system, "boot_id", lambda: "after the power cut")
    assert distrust_tracker(tmp_path) == "iter_0000020" and tracker.read_text() == "10"
    assert distrust_tracker(tmp_path) is None
    monkeypatch.undo()
    _in_megatron(tmp_path, model, state, 30)  # a Megatron whose saves nobody commits: no more than one is lost
    monkeypatch.setattr(system, "boot_id", lambda: "after the power cut")
    assert distrust_tracker(tmp_path) is None and tracker.read_text() == "30"


def test_a_first_save_that_no_commit_followed(
    tmp_path: Path, state: MakeState, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _in_megatron(tmp_path, model, state, 10)
    monkeypatch.setattr(system, "boot_id", lambda: "after the power cut")
    assert distrust_tracker(tmp_path) == "iter_0000010"
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists() and choose(tmp_path) is None


def test_files_of_another_layout_are_refused(root: Path, state: MakeState, model: Model) -> None:
    """Left by a save of more ranks: DeepSpeed would read it as one of this checkpoint."""
    pending = begin_save(root, tag="global_step40", iteration=40, state=state(320))
    model(pending.tag_dir, state(320))
    other = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (pending.tag_dir / other).write_bytes(b"older")
    with pytest.raises(CheckpointError, match="incomplete") as raised:
        commit_save(pending, expected_files=FILES)
    assert f"{other} is there, but no rank of this save writes it" in str(raised.value.found)
    assert (root / "latest").read_text() == "global_step30"


@pytest.mark.parametrize("content", [None, b"cut sh"], ids=["missing", "short"])
def test_what_a_rank_wrote_beside_must_be_there(
    root: Path, state: MakeState, model: Model, content: bytes | None
) -> None:
    pending = begin_save(root, tag="global_step40", iteration=40, state=state(320))
    model(pending.tag_dir, state(320))
    if content is not None:
        (root / "megaresume" / "rank_0.json").write_bytes(content)
    beside = [FileEntry(path="rank_0.json", size=9, checksum="0" * 32)]
    with pytest.raises(CheckpointError, match="incomplete") as raised:
        commit_save(pending, expected_files=FILES, beside=beside)
    words = "is missing" if content is None else "has 6 of 9 bytes"
    assert f"rank_0.json {words}" in str(raised.value.found)
    assert (root / "latest").read_text() == "global_step30"


def test_giving_up_a_save_leaves_what_was_committed(root: Path) -> None:
    before = snapshot(root)
    abandon_save(root, iteration=30, tag="global_step30")
    assert snapshot(root) == before
