from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.checkpoint.load.choose import check_not_root, choose, confirm_choice
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.lock.lock import write_step_file
from megaresume.checkpoint.records.names import step_path
from megaresume.checkpoint.records.sealed import seal
from megaresume.checkpoint.save.commit import Commit, begin_save, commit_save
from megaresume.checkpoint.starts import check_fresh_start, record_start
from megaresume.runs.directory import Run
from megaresume.stream.errors import CheckpointError, NewerFormatError, StateError, UsageError
from megaresume.stream.state import StreamState

MODEL = "mp_rank_00_model_states.pt"

Save = Callable[..., Commit]
MakeState = Callable[..., StreamState]
Model = Callable[[Path, StreamState], None]


def chosen(root: Path, **kwargs: object) -> Choice:
    choice = choose(root, **kwargs)  # type: ignore[arg-type]
    assert choice is not None
    return choice


def point(root: Path, iteration: int) -> None:
    (root / "latest").write_text(f"global_step{iteration}")
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def interrupted_commit(root: Path, iteration: int, state: StreamState, model: Model) -> None:
    """Everything of a commit up to the manifest; the pointers, the ledger and the marker as a kill leaves them."""
    names = ("latest", "latest_checkpointed_iteration.txt", "megaresume/ledger.jsonl")
    before = {name: (root / name).read_bytes() for name in names}
    pending = begin_save(root, tag=f"global_step{iteration}", iteration=iteration, state=state)
    model(pending.tag_dir, state)
    marker = root / "megaresume" / f"step_{iteration:07d}.saving.json"
    kept = marker.read_bytes()
    commit_save(pending)
    marker.write_bytes(kept)
    for name, data in before.items():
        (root / name).write_bytes(data)


def unmanaged(root: Path, tag: str) -> None:
    (root / tag).mkdir(parents=True)
    (root / tag / MODEL).write_bytes(b"weights")


# -- nothing, and everything well


def test_nothing_there(tmp_path: Path) -> None:
    assert choose(tmp_path) is None
    assert choose(tmp_path / "missing") is None
    (tmp_path / "somebody_elses_directory").mkdir()
    assert choose(tmp_path) is None


def test_a_run_that_has_begun_and_saved_nothing(tmp_path: Path, state: MakeState) -> None:
    record_start(tmp_path, iteration=0, state=state(0))
    assert choose(tmp_path) is None


def test_the_newest(root: Path, state: MakeState) -> None:
    choice = chosen(root)
    assert (choice.tag, choice.iteration, choice.state) == ("global_step30", 30, state(240))
    assert choice.digest == state(240).digest
    assert choice.tag_dir == root / "global_step30"
    assert (choice.rejected, choice.notes) == ((), ())


def test_a_file_or_a_tag_directory_is_bad_usage(root: Path) -> None:
    with pytest.raises(UsageError, match="is a file"):
        choose(root / "latest")
    with pytest.raises(UsageError, match="tag directory, not a checkpoint root"):
        choose(root / "global_step10")


def test_a_root_in_the_place_of_a_checkpoint_is_bad_usage(root: Path) -> None:
    with pytest.raises(UsageError, match="directory of checkpoints, not a checkpoint") as refused:
        check_not_root(root)
    assert refused.value.action is not None and f"load {root / 'global_step30'}" in refused.value.action
    inside = root / "global_step30"
    (inside / "global_step30").mkdir()  # as in Hugging Face's checkpoint of a DeepSpeed engine
    for directory in (inside, root / "global_step99", root.parent):
        check_not_root(directory)


# -- walking back


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / MODEL).unlink(), f"{MODEL}: is missing, had 1024 bytes"),
        (lambda d: (d / MODEL).write_bytes(b""), f"{MODEL}: has 0 bytes, had 1024 when it was saved"),
        (lambda d: os.truncate(d / MODEL, 1000), f"{MODEL}: has 1000 bytes, had 1024"),
        (lambda d: (d.parent / "megaresume/step_0000030.json").unlink(), "the data state is missing"),
        (lambda d: os.truncate(d.parent / "megaresume/step_0000030.json", 100), "the data state is cut short"),
        (lambda d: os.truncate(d.parent / "megaresume/step_0000030.json", 0), "the data state is empty"),
        (lambda d: os.truncate(d.parent / "megaresume/step_0000030.manifest.json", 50), "the manifest is cut short"),
        (lambda d: (d.parent / "megaresume/step_0000030.manifest.json").unlink(), "it has records but no manifest"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    root: Path, state: MakeState, damage: Callable[[Path], None], reason: str
) -> None:
    damage(root / "global_step30")
    choice = chosen(root)
    assert (choice.iteration, choice.state) == (20, state(160))
    (rejected,) = choice.rejected
    assert (rejected.tag, rejected.iteration) == ("global_step30", 30)
    assert reason in rejected.reason
    with pytest.raises(CheckpointError, match="cannot be loaded") as caught:
        choose(root, tag="global_step30")
    assert reason in str(caught.value)


def test_flipped_bits_in_weights_are_found_by_checksums_only(root: Path) -> None:
    path = root / "global_step30" / MODEL
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    assert chosen(root).iteration == 30
    choice = chosen(root, checksums=True)
    assert choice.iteration == 20
    assert "checksum is" in choice.rejected[0].reason


def test_walking_back_twice(root: Path) -> None:
    (root / "global_step30" / MODEL).unlink()
    (root / "global_step20" / MODEL).unlink()
    choice = chosen(root)
    assert choice.iteration == 10
    assert [r.tag for r in choice.rejected] == ["global_step30", "global_step20"]


def test_none_complete_is_an_error_that_lists_them(root: Path) -> None:
    for iteration in (10, 20, 30):
        (root / f"global_step{iteration}" / MODEL).unlink()
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints") as caught:
        choose(root)
    for iteration in (10, 20, 30):
        assert f"global_step{iteration} is damaged: {MODEL}: is missing" in str(caught.value)


def test_pruned_checkpoints_are_no_damage(root: Path) -> None:
    shutil.rmtree(root / "global_step10")
    choice = chosen(root)
    assert (choice.iteration, choice.rejected) == (30, ())
    with pytest.raises(CheckpointError, match="there is no checkpoint global_step10"):
        choose(root, tag="global_step10")


def test_all_checkpoints_deleted_is_no_fresh_start(root: Path) -> None:
    for iteration in (10, 20, 30):
        shutil.rmtree(root / f"global_step{iteration}")
    with pytest.raises(CheckpointError, match="there are pointers but no checkpoint"):
        choose(root)
    (root / "latest").unlink()
    (root / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(CheckpointError, match="there are records of checkpoints but no checkpoint"):
        choose(root)


def test_a_ledger_or_model_files_alone_are_no_fresh_start(root: Path) -> None:
    for iteration in (10, 20):
        shutil.rmtree(root / f"global_step{iteration}")
    (root / "global_step30").rename(root / "best")
    for path in (root / "latest", root / "latest_checkpointed_iteration.txt", *(root / "megaresume").glob("step_*")):
        path.unlink()
    with pytest.raises(CheckpointError, match="there are records of checkpoints but no checkpoint") as caught:
        choose(root)
    assert "global_step30, global_step20, global_step10" in str(caught.value)
    (root / "megaresume/ledger.jsonl").unlink()
    with pytest.raises(CheckpointError, match="there are model files, but nothing says") as caught:
        choose(root)
    assert "best" in str(caught.value)
    shutil.rmtree(root / "best")
    assert choose(root) is None


def test_a_checkpoint_of_another_run_without_a_ledger_is_refused(root: Path, tmp_path: Path, save: Save) -> None:
    """It would be the newest one, whole, with records of its own."""
    other = tmp_path / "other"
    save(other, 40, salt=1)
    shutil.copytree(other / "global_step40", root / "global_step40")
    for path in (other / "megaresume").glob("step_0000040*.json"):
        shutil.copy(path, root / "megaresume")
    choice = chosen(root)
    assert choice.iteration == 30 and choice.rejected == ()
    point(root, 40)
    choice = chosen(root)
    assert choice.iteration == 30 and "another run" in choice.rejected[0].reason
    (root / "megaresume/ledger.jsonl").unlink()
    with pytest.raises(CheckpointError, match="checkpoints of several runs, and no ledger") as caught:
        choose(root)
    assert "global_step40 of run" in str(caught.value) and "global_step30 of run" in str(caught.value)


def test_a_start_that_loads_nothing_saves_over_no_damaged_checkpoints(root: Path) -> None:
    with pytest.raises(UsageError, match="did not load a checkpoint of this directory"):
        check_fresh_start(root, cause="it was forgotten", load="load it")
    for iteration in (10, 20, 30):
        (root / f"global_step{iteration}" / MODEL).unlink()
    with pytest.raises(CheckpointError, match="is complete") as caught:
        check_fresh_start(root, cause="it was forgotten", load="load it")
    assert "restore a checkpoint from a copy" in str(caught.value)


def test_a_pointer_without_any_checkpoint_is_no_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"")
    with pytest.raises(CheckpointError, match="latest is empty"):
        choose(tmp_path)


# -- saves that were killed


def test_a_killed_save_is_passed_over(root: Path, state: MakeState, model: Model) -> None:
    begin_save(root, tag="global_step40", iteration=40, state=state(320))
    assert chosen(root).rejected == ()  # not even a directory
    model(root / "global_step40", state(320))
    (root / "latest").write_text("global_step40")  # as DeepSpeed does before the other ranks are done
    choice = chosen(root)
    assert choice.iteration == 30
    assert choice.rejected[0].tag == "global_step40"
    assert "its save began" in choice.rejected[0].reason
    assert "did not end" in choice.rejected[0].reason


def test_a_first_save_that_is_killed_before_its_manifest_leaves_a_fresh_start(
    tmp_path: Path, state: MakeState, model: Model
) -> None:
    """Also when its data state was written already: nothing was ever committed, so nothing can have been lost."""
    pending = begin_save(tmp_path, tag="global_step10", iteration=10, state=state(80))
    model(pending.tag_dir, state(80))
    write_step_file(step_path(tmp_path, 10, "global_step10"), pending.record)
    assert choose(tmp_path) is None
    assert confirm_choice(tmp_path, None, timeout_seconds=0) is None


def test_deepspeeds_early_pointer_has_no_vote(root: Path, state: MakeState, model: Model) -> None:
    """Somebody went back to 10; the first save after that was killed. The pointers do not "disagree" for that."""
    point(root, 10)
    record_start(root, iteration=10, state=state(80), choice=choose(root))
    begin_save(root, tag="global_step15", iteration=15, state=state(120))
    model(root / "global_step15", state(120))
    (root / "latest").write_text("global_step15")
    choice = chosen(root)
    assert choice.iteration == 10
    assert choice.notes[0] == "latest names global_step15, whose save did not end"


def test_killed_between_manifest_and_pointers_counts(root: Path, state: MakeState, model: Model) -> None:
    interrupted_commit(root, 40, state(320), model)
    choice = chosen(root)
    assert (choice.iteration, choice.state) == (40, state(320))
    assert "killed before the pointers were moved" in choice.notes[0]
    record_start(root, iteration=40, state=state(320), choice=choice)
    assert (root / "latest").read_text() == "global_step40"
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "40"
    assert not (root / "megaresume/step_0000040.saving.json").exists()
    choice = chosen(root)
    assert (choice.iteration, choice.notes) == (40, ())
    kinds = [json.loads(line)["kind"] for line in (root / "megaresume/ledger.jsonl").read_bytes().splitlines()]
    assert kinds == ["checkpoint", "durable"] * 3 + ["checkpoint", "start"]


def test_a_killed_commit_that_was_not_loaded_stays_behind(
    root: Path, state: MakeState, model: Model, save: Save
) -> None:
    interrupted_commit(root, 40, state(320), model)
    record_start(root, iteration=10, state=state(80), choice=choose(root, tag="global_step10"))
    assert chosen(root).iteration == 30  # the pointers have not moved yet
    save(root, 15)
    choice = chosen(root)
    assert choice.iteration == 15
    assert "the pointers name global_step15, although global_step40, global_step30, global_step20" in choice.notes[0]


def test_a_step_that_is_being_saved_again_is_not_complete(root: Path, state: MakeState) -> None:
    """Sizes and state fit, but a file may be of one save and the next of the other."""
    begin_save(root, tag="global_step30", iteration=30, state=state(240, salt=1))
    choice = chosen(root)
    assert choice.iteration == 20
    assert "a second save of this step began" in choice.rejected[0].reason


def test_a_damaged_marker_is_no_permission(root: Path, state: MakeState) -> None:
    begin_save(root, tag="global_step30", iteration=30, state=state(240))
    (root / "megaresume/step_0000030.saving.json").write_bytes(b"{")
    assert chosen(root).iteration == 20


# -- pointers


def test_pointers_moved_back_on_purpose_are_followed(root: Path) -> None:
    point(root, 10)
    choice = chosen(root)
    assert choice.iteration == 10
    assert "the pointers are followed" in choice.notes[0]


def test_walking_back_from_pointers_does_not_go_forward_first(root: Path) -> None:
    point(root, 20)
    (root / "global_step20" / MODEL).unlink()
    assert chosen(root).iteration == 10
    (root / "global_step10" / MODEL).unlink()
    choice = chosen(root)
    assert choice.iteration == 30
    assert "although it is newer than the pointers" in choice.notes[0]


@pytest.mark.parametrize(("latest", "tracker"), [("global_step10", "30"), ("global_step20", "10")])
def test_pointers_that_disagree(root: Path, latest: str, tracker: str) -> None:
    (root / "latest").write_text(latest)
    (root / "latest_checkpointed_iteration.txt").write_text(tracker)
    choice = chosen(root)
    assert choice.iteration == 30
    assert "the pointers disagree" in choice.notes[0]
    assert latest in choice.notes[0]


@pytest.mark.parametrize("name", ["latest", "latest_checkpointed_iteration.txt"])
@pytest.mark.parametrize(("data", "words"), [(b"", "is empty"), (b"\0\0", "holds"), (b"99", "no such checkpoint")])
def test_one_bad_pointer_is_noted_and_the_other_followed(root: Path, name: str, data: bytes, words: str) -> None:
    point(root, 20)
    (root / name).write_bytes(data)
    choice = chosen(root)
    assert choice.iteration == 20
    assert name in choice.notes[0]
    assert words in choice.notes[0]


def test_no_pointers_at_all(root: Path) -> None:
    (root / "latest").unlink()
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert chosen(root).iteration == 30


def test_a_given_up_branch_is_no_place_to_fall_back_to(root: Path, save: Save, state: MakeState) -> None:
    record_start(root, iteration=10, state=state(80), choice=choose(root, tag="global_step10"))
    save(root, 25, salt=1)
    save(root, 35, salt=1)
    (root / "global_step35" / MODEL).unlink()
    (root / "global_step25" / MODEL).unlink()
    choice = chosen(root)
    assert choice.iteration == 10  # not 20, not 30: they are of the branch that was given up
    (root / "global_step10" / MODEL).unlink()
    choice = chosen(root)
    assert choice.iteration == 30
    assert "given up" in choice.notes[0]


# -- exactly this one


def test_exactly_this_one(root: Path) -> None:
    assert chosen(root, tag="global_step10").iteration == 10
    found = Run(root).choose(20)
    assert found is not None and found.tag == "global_step20"
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint of iteration 99(.|\n)*megaresume inspect .* lists them"
    ):
        Run(root).choose(99)
    with pytest.raises(CheckpointError, match="there is no checkpoint global_step10 of 20"):
        Run(root, "global_step10").choose(20)
    with pytest.raises(CheckpointError, match="there is no checkpoint global_step99") as caught:
        choose(root, tag="global_step99")
    assert "global_step30, global_step20, global_step10" in str(caught.value)
    with pytest.raises(UsageError):
        choose(root, tag="../elsewhere")


def test_tags_of_the_users_own(tmp_path: Path, save: Save, state: MakeState) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20, tag="before.the@spike")
    choice = chosen(tmp_path)
    assert (choice.tag, choice.iteration, choice.state) == ("before.the@spike", 20, state(160))
    assert (choice.notes, choice.rejected) == ((), ())
    found = Run(tmp_path).choose(20)
    assert found is not None and found.tag == "before.the@spike"
    save(tmp_path, 20)
    assert chosen(tmp_path).tag == "global_step20"
    assert chosen(tmp_path, tag="before.the@spike").iteration == 20


def test_engine_steps_that_differ_from_iterations(tmp_path: Path, save: Save) -> None:
    """Megatron-DeepSpeed names tags after the engine's steps, the tracker after the iteration."""
    save(tmp_path, 5010, tag="global_step10")
    choice = chosen(tmp_path)
    assert (choice.tag, choice.iteration, choice.notes) == ("global_step10", 5010, ())


def test_a_universal_checkpoint_takes_the_state_of_its_origin(root: Path, state: MakeState) -> None:
    (root / "global_step20_universal").mkdir()
    (root / "global_step20_universal" / "mp_rank_00_model_states.pt").write_bytes(b"converted")
    choice = chosen(root, tag="global_step20_universal")
    assert (choice.tag, choice.iteration, choice.state) == ("global_step20_universal", 20, state(160))
    (root / "megaresume/step_0000020.json").unlink()
    with pytest.raises(CheckpointError, match="has no data state"):
        choose(root, tag="global_step20_universal")
    assert chosen(root).iteration == 30  # never chosen by itself


# -- written without megaresume


def test_before_adoption(tmp_path: Path) -> None:
    for tag in ("global_step100", "global_step200"):
        unmanaged(tmp_path, tag)
    (tmp_path / "latest").write_text("global_step200")
    choice = chosen(tmp_path)
    assert (choice.tag, choice.iteration, choice.state, choice.manifest) == ("global_step200", 200, None, None)
    assert "written without megaresume" in choice.notes[0]
    assert chosen(tmp_path, tag="global_step100").state is None


def test_adoption(tmp_path: Path, save: Save, state: MakeState) -> None:
    unmanaged(tmp_path, "global_step100")
    (tmp_path / "latest").write_text("global_step100")
    save(tmp_path, 110)
    assert chosen(tmp_path).iteration == 110
    (tmp_path / "global_step110" / MODEL).unlink()
    choice = chosen(tmp_path)
    assert (choice.tag, choice.state) == ("global_step100", None)
    assert choice.rejected[0].tag == "global_step110"


def test_walking_back_prefers_what_is_known_to_be_complete(root: Path) -> None:
    unmanaged(root, "global_step25")
    (root / "global_step30" / MODEL).unlink()
    choice = chosen(root)
    assert choice.iteration == 20
    assert [r.tag for r in choice.rejected] == ["global_step30", "global_step25"]


def test_pointers_to_one_without_a_state_leave_it_to_the_caller(root: Path) -> None:
    unmanaged(root, "global_step40")
    point(root, 40)
    choice = chosen(root)
    assert (choice.tag, choice.state) == ("global_step40", None)
    assert "written without megaresume" in choice.notes[-1]


@pytest.mark.parametrize("latest", ["global_step30", "global_step50"])
def test_newer_ones_without_a_state_are_named(root: Path, latest: str) -> None:
    """Of trainers that move no pointer, and of those that move one of the two."""
    for tag in ("global_step40", "global_step50"):
        unmanaged(root, tag)
    (root / "latest").write_text(latest)
    choice = chosen(root)
    assert choice.iteration == 30
    assert [r.tag for r in choice.rejected] == ["global_step50", "global_step40"]
    assert "(global_step50, global_step40), and saves of the same steps replace it" in choice.notes[-1]


def test_release(tmp_path: Path) -> None:
    unmanaged(tmp_path, "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    choice = chosen(tmp_path)
    assert (choice.tag, choice.iteration, choice.state) == ("release", None, None)


def test_empty_weights_are_seen_without_a_manifest(tmp_path: Path) -> None:
    unmanaged(tmp_path, "iter_0000100")
    unmanaged(tmp_path, "iter_0000200")
    (tmp_path / "iter_0000200" / MODEL).write_bytes(b"")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("200")
    choice = chosen(tmp_path)
    assert choice.iteration == 100
    assert choice.rejected[0].reason == f"{MODEL} has 0 bytes"


# -- of another run, of another version


def test_records_of_another_run_are_refused(root: Path, tmp_path: Path, save: Save) -> None:
    other = tmp_path / "other"
    save(other, 30, salt=1)
    shutil.copytree(other / "global_step30", root / "global_step30", dirs_exist_ok=True)
    for name in ("step_0000030.json", "step_0000030.manifest.json"):
        shutil.copy(other / "megaresume" / name, root / "megaresume" / name)
    choice = chosen(root)
    assert choice.iteration == 20
    assert "belongs to another run" in choice.rejected[0].reason


@pytest.mark.parametrize("name", ["step_0000030.json", "step_0000030.manifest.json"])
def test_one_record_of_another_save_is_refused(root: Path, tmp_path: Path, save: Save, name: str) -> None:
    kept = (root / "megaresume" / name).read_bytes()
    save(root, 30, salt=1)
    (root / "megaresume" / name).write_bytes(kept)
    choice = chosen(root)
    assert choice.iteration == 20
    assert "from different saves" in choice.rejected[0].reason


def test_a_renamed_tag_directory_is_not_the_other_step(root: Path) -> None:
    for suffix in ("", ".manifest"):
        source = root / "megaresume" / f"step_0000020{suffix}.json"
        shutil.copy(source, root / "megaresume" / f"step_0000030{suffix}.json")
    choice = chosen(root)
    assert choice.iteration == 20
    assert "the manifest belongs to another checkpoint" in choice.rejected[0].reason


@pytest.mark.parametrize("name", ["step_0000030.json", "step_0000030.manifest.json"])
def test_a_newer_version_stops_instead_of_walking_back(root: Path, name: str) -> None:
    path = root / "megaresume" / name
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    path.write_bytes(seal(fields | {"version": 99}))
    with pytest.raises(NewerFormatError, match="written by a newer megaresume"):
        choose(root)
    assert issubclass(NewerFormatError, StateError)
    assert chosen(root, tag="global_step20").iteration == 20


def test_choosing_writes_nothing(root: Path) -> None:
    def look() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in root.rglob("*")}

    before = look()
    choose(root, checksums=True)
    assert look() == before
