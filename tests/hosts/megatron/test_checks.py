"""Loud where stock Megatron is silent. Every refusal says what to pass instead; what is fine passes."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megaresume.batches.open import open_stream
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.checkpoint.records.ledger import LedgerEntry, append_ledger
from megaresume.checkpoint.records.marker import Marker, write_marker
from megaresume.checkpoint.records.names import ledger_path, marker_path
from megaresume.checkpoint.save.commit import PendingCheckpoint, begin_save, commit_save
from megaresume.checkpoint.settings import Checkpoints
from megaresume.checkpoint.system import Topology
from megaresume.hosts.megatron import checks
from megaresume.hosts.megatron.arguments import Settings
from megaresume.hosts.megatron.host import MegatronHost
from megaresume.hosts.megatron.load_rules import around_read_metadata, check_tracker, mend_tracker
from megaresume.hosts.megatron.project import Project
from megaresume.stream.errors import CheckpointError, UsageError
from megaresume.stream.stream import Stream
from tests.hosts.megatron.guard.loads import order_state

TRACKER = "latest_checkpointed_iteration.txt"


def project(version: str = "0.16.1", kind: Any = "megatron-lm") -> Project:
    return Project(kind=kind, root=Path(), version=version, modules={})


def host_of(args: Namespace, *, mode: Any = "guard", version: str = "0.16.1") -> MegatronHost:
    return MegatronHost(project(version), args, Settings(mode=mode))


# Flags


@pytest.mark.parametrize(
    ("flags", "which", "words"),
    [
        ({"dataloader_type": "cyclic"}, project(), "--dataloader-type single"),
        ({"repeated_dataloader": True}, project(kind="megatron-deepspeed"), "leave the flag out"),
        ({"mock_data": True}, project(), "--megaresume-mode guard"),
        ({"fim_data": True}, project(), "--megaresume-mode guard"),
        ({"full_validation": True}, project(), "--eval-iters"),
        ({"multiple_validation_sets": True}, project(), "--megaresume-mode guard"),
        ({"perform_rl_step": True}, project(), "--megaresume-mode off"),
        ({"hybrid_context_parallel": True}, project(), "--megaresume-mode guard"),
        ({"train_weighted_split_paths": [["web"]]}, project(kind="bigscience"), "--megaresume-data"),
        ({"data_efficiency_curriculum_learning": True}, project(kind="megatron-deepspeed"), "--megaresume-mode guard"),
        ({"curriculum_learning": True}, project(kind="bigscience"), "--megaresume-mode guard"),
    ],
)
def test_flags_that_no_stream_can_have(flags: dict[str, Any], which: Project, words: str) -> None:
    with pytest.raises(UsageError) as error:
        checks.check_flags(Namespace(**flags), Settings(mode="stream"), which)
    assert words in str(error.value.action)
    checks.check_flags(Namespace(**flags), Settings(mode="guard"), which)
    checks.check_flags(Namespace(**dict.fromkeys(flags)), Settings(mode="stream"), which)


def test_ignored_rampup() -> None:
    args = Namespace(rampup_batch_size=["8", "8", "100"])
    for mode in ("guard", "stream"):
        with pytest.raises(UsageError, match="ignores --rampup-batch-size"):
            checks.check_flags(args, Settings(mode=mode), project("0.18.0"))
        checks.check_flags(args, Settings(mode=mode), project("0.17.1"))
    checks.check_flags(args, Settings(mode="off"), project("0.18.0"))
    checks.check_flags(args, Settings(mode="stream"), project("3.0", kind="megatron-deepspeed"))


@pytest.mark.parametrize("save", [None, "msc://far/run"])
def test_copies_of_what_is_not_on_a_disk(save: str | None) -> None:
    settings = Settings(mode="guard", checkpoints=Checkpoints(stage_to="s3://runs/run"))
    with pytest.raises(UsageError, match="--megaresume-stage-to needs --save"):
        checks.check_flags(Namespace(save=save), settings, project())
    checks.check_flags(Namespace(save="/nvme/run"), settings, project())


def test_validate_args_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "current_project", project)

    def validate_args(args: Namespace, defaults: dict[str, str]) -> Namespace:
        args.dataloader_type = defaults["dataloader_type"]
        return args

    wrapped = checks.around_validate_args(validate_args)
    args = Namespace(megaresume_data="d.yaml")
    assert wrapped(args, {"dataloader_type": "single"}) is args
    with pytest.raises(UsageError, match="cyclic"):
        wrapped(args, {"dataloader_type": "cyclic"})


# The tracker


@pytest.mark.parametrize("text", ["", "  \n", "1O", "12 13", "\x00\x00", "-1"])
def test_tracker_that_says_nothing(tmp_path: Path, text: str) -> None:
    def read_metadata(path: str) -> tuple[int, bool]:
        raise AssertionError("stock Megatron must not be asked")

    path = tmp_path / TRACKER
    path.write_text(text)
    with pytest.raises(CheckpointError, match="pointers but no checkpoint"):
        around_read_metadata(read_metadata)(str(path))
    (tmp_path / "iter_0000010").mkdir()  # which no manifest vouches for
    (tmp_path / "iter_0000010" / "common.pt").write_bytes(b"weights")
    with pytest.raises(CheckpointError) as error:
        around_read_metadata(read_metadata)(str(path))
    assert f"echo 10 > {path}" in str(error.value) and f"megaresume inspect {tmp_path}" in str(error.value)


def test_tracker_that_is_fine(tmp_path: Path) -> None:
    path = tmp_path / TRACKER
    for text in ("12", "0", "release", "7\n"):
        path.write_text(text)
        assert around_read_metadata(lambda path: (path, False))(str(path)) == (str(path), False)


def test_exit_becomes_an_error(tmp_path: Path) -> None:
    """In object storage we do not look ourselves; Megatron's exit with status 0 is an error nevertheless."""

    def read_metadata(path: str) -> None:
        raise SystemExit

    with pytest.raises(CheckpointError):
        around_read_metadata(read_metadata)(f"msc://bucket/{TRACKER}")


def args_for(load: object, save: object = None, **more: Any) -> Namespace:
    return Namespace(load=str(load), save=None if save is None else str(save), **more)


def test_first_start(tmp_path: Path) -> None:
    check_tracker(Namespace(load=None))
    check_tracker(args_for(tmp_path / "new", tmp_path / "new"))
    check_tracker(args_for(tmp_path, f"{tmp_path}/."))
    check_tracker(args_for("msc://bucket/run", tmp_path))


def test_nothing_where_something_must_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to load") as error:
        check_tracker(args_for(tmp_path / "gone", tmp_path / "save"))
    assert "does not exist" in str(error.value)
    with pytest.raises(CheckpointError):
        check_tracker(args_for(tmp_path / "gone"))
    with pytest.raises(CheckpointError) as error:
        check_tracker(args_for(tmp_path, tmp_path, exit_on_missing_checkpoint=True))
    assert "--exit-on-missing-checkpoint" in str(error.value.expected)


def test_what_megatron_loads_without_a_tracker(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010").mkdir()
    with pytest.raises(CheckpointError, match="but no tracker"):
        check_tracker(args_for(tmp_path, tmp_path))
    check_tracker(args_for(tmp_path, tmp_path, ckpt_step=10))
    check_tracker(args_for(tmp_path, tmp_path, pretrained_checkpoint="/elsewhere"))
    check_tracker(args_for(tmp_path, tmp_path, non_persistent_ckpt_type="local"))
    with pytest.raises(CheckpointError):
        check_tracker(args_for(tmp_path, tmp_path, non_persistent_ckpt_type="global"))
    (tmp_path / "non_persistent").mkdir()
    (tmp_path / "non_persistent" / TRACKER).write_text("12")
    check_tracker(args_for(tmp_path, tmp_path, non_persistent_ckpt_type="global"))
    (tmp_path / TRACKER).write_text("10")
    check_tracker(args_for(tmp_path, tmp_path))


def test_step_that_is_not_there(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
        (tmp_path / f"iter_{iteration:07d}" / "common.pt").write_bytes(b"weights")
    (tmp_path / "global_step15").mkdir()  # DeepSpeed's, which Megatron does not load
    args = args_for(tmp_path, tmp_path / "save")
    for tracker in (None, "30"):
        if tracker is not None:
            (tmp_path / TRACKER).write_text(tracker)
        for step, instead in ((25, 20), (5, 10), (40, 30), (15, 10)):
            args.ckpt_step = step
            with pytest.raises(CheckpointError, match=f"no checkpoint of iteration {step}") as error:
                check_tracker(args)
            assert str(error.value.found).endswith("iterations 30, 20, 10")
            assert str(error.value.action).startswith(f"--ckpt-step {instead};")
        args.ckpt_step = 20
        check_tracker(args)
    # Megatron takes the newest of two directories, or the one of the release.
    args.ckpt_step = 25
    check_tracker(args_for(tmp_path, tmp_path, ckpt_step=25, non_persistent_ckpt_type="global"))
    (tmp_path / "release").mkdir()
    (tmp_path / TRACKER).write_text("release")
    check_tracker(args)


def test_step_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 7") as error:
        check_tracker(args_for(tmp_path / "gone", tmp_path, ckpt_step=7))
    assert "--load" in str(error.value.action) and "no checkpoint of any" in str(error.value.found)
    check_tracker(args_for(tmp_path / "gone", tmp_path, ckpt_step=7, pretrained_checkpoint="/elsewhere"))


def test_step_that_is_not_there_in_a_run(mini: Any, data_yaml: Path, tmp_path: Path) -> None:
    """On all ranks, before Megatron opens a file."""
    pytest.importorskip("megatron.core")
    words = ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--ckpt-step", 5]
    words += ["--train-iters", 8, "--micro-batch-size", 2, "--global-batch-size", 8, "--load", tmp_path]
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "iter_0000004" / "common.pt").write_bytes(b"weights")
    (tmp_path / TRACKER).write_text("4")
    run = mini(*words)
    assert run.status == 1 and "Traceback" not in run.output and run.steps() == {}, run.output
    assert run.output.count("megaresume: error: there is no checkpoint of iteration 5") == 1, run.output
    assert "iterations 4" in run.output and "--ckpt-step 4" in run.output


def entry(kind: Any) -> LedgerEntry:
    return LedgerEntry(
        kind=kind,
        iteration=10,
        tag="iter_0000010",
        samples=80,
        digest="0" * 16,
        run="0" * 16,
        time="2026-01-01T00:00:00.000Z",
        topology=Topology(),
    )


def test_ledger_without_checkpoints(tmp_path: Path) -> None:
    """A start alone is no checkpoint: the run may have died before its first save."""
    append_ledger(ledger_path(tmp_path), entry("start"))
    check_tracker(args_for(tmp_path, tmp_path))
    append_ledger(ledger_path(tmp_path), entry("checkpoint"))
    with pytest.raises(CheckpointError) as error:
        check_tracker(args_for(tmp_path, tmp_path))
    assert "the ledger knows of 1, the last of them iter_0000010" in str(error.value.found)


def cut_short(root: Path) -> None:
    """What a kill in the first save leaves."""
    (root / "iter_0000010").mkdir()
    (root / "iter_0000010" / "common.pt").write_bytes(b"weights")
    marker = Marker(
        iteration=10, tag="iter_0000010", save_id="0", run="0", began_at="then", latest=False, tracker=False
    )
    (root / "megaresume").mkdir()
    write_marker(marker_path(root, 10, "iter_0000010"), marker)


def test_first_save_cut_short(tmp_path: Path) -> None:
    cut_short(tmp_path)
    assert check_tracker(args_for(tmp_path, tmp_path)) is None


def test_first_save_killed_in_the_tracker(tmp_path: Path) -> None:
    """A fresh start, if ledger and directory prove that nothing was ever committed."""
    path = tmp_path / TRACKER
    cut_short(tmp_path)
    path.write_text("")
    assert check_tracker(args_for(tmp_path, tmp_path)) is None and path.exists(), "reads only"
    with pytest.raises(CheckpointError) as error:  # asked before the load, for the arguments in the checkpoint
        around_read_metadata(lambda path: (path, False))(str(path))
    assert f"rm {path}" in str(error.value)
    with pytest.raises(CheckpointError, match="no checkpoint to load"):
        check_tracker(args_for(tmp_path, tmp_path / "elsewhere"))
    mend_tracker(tmp_path, None)
    assert not path.exists()
    path.write_text("")
    append_ledger(ledger_path(tmp_path), entry("checkpoint"))
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        check_tracker(args_for(tmp_path, tmp_path))
    assert path.exists()


def begin(root: Path, stream: Stream, iteration: int) -> PendingCheckpoint:
    """A save with all its files."""
    tag = f"iter_{iteration:07d}"
    pending = begin_save(root, tag=tag, iteration=iteration, state=stream.state_at(8 * iteration), latest=False)
    (root / tag).mkdir(exist_ok=True)
    (root / tag / "common.pt").write_bytes(b"weights")
    return pending


def chosen(args: Namespace) -> Choice:
    found = check_tracker(args)
    assert isinstance(found, Choice)
    return found


@pytest.mark.parametrize("text", ["", "2", "1O"])
def test_tracker_that_a_kill_has_left(tmp_path: Path, data_yaml: Path, text: str) -> None:
    """The newest that a manifest vouches for, as under every other host; not the one that was being saved."""
    stream, path = open_stream(data_yaml), tmp_path / TRACKER
    for iteration in (10, 20):
        commit_save(begin(tmp_path, stream, iteration))
    begin(tmp_path, stream, 30)
    path.write_text(text)
    choice = chosen(args_for(tmp_path, tmp_path))
    assert choice.tag == "iter_0000020" and [r.tag for r in choice.rejected] == ["iter_0000030"]
    assert TRACKER in choice.notes[0]
    assert around_read_metadata(lambda path: pytest.fail("asked"))(str(path)) == (20, False)
    assert chosen(args_for(tmp_path, tmp_path, ckpt_step=10)).tag == "iter_0000010"
    mend_tracker(tmp_path, choice)
    assert path.read_text() == "20"
    mend_tracker(tmp_path, None)
    assert path.read_text() == "20", "it is whole"


def test_damaged_checkpoint_is_named(tmp_path: Path, data_yaml: Path) -> None:
    stream = open_stream(data_yaml)
    for iteration in (10, 20):
        commit_save(begin(tmp_path, stream, iteration))
    args = args_for(tmp_path, tmp_path)
    choice = chosen(args)
    assert choice.tag == "iter_0000020" and not choice.rejected and not choice.notes
    (tmp_path / "iter_0000020" / "common.pt").write_bytes(b"wei")
    instead = chosen(args)
    assert instead.tag == "iter_0000010"
    assert [r.tag for r in instead.rejected] == ["iter_0000020"] and "common.pt: has 3 bytes" in str(
        instead.rejected[0]
    )
    args.ckpt_step = 20  # asked for by name
    with pytest.raises(CheckpointError, match="iter_0000020 is damaged") as error:
        check_tracker(args)
    assert "--ckpt-step 10" in str(error.value.action)
    args.ckpt_step = 10
    choice = chosen(args)
    assert choice.tag == "iter_0000010" and not choice.rejected
    # Being saved once more: mixed files, unless the tracker moved after that save began.
    args.ckpt_step = None
    tracker = tmp_path / TRACKER
    begin(tmp_path, stream, 20)
    os.utime(tracker, ns=(1, 1))
    instead = chosen(args)
    assert instead.tag == "iter_0000010"
    assert "did not end" in str(instead.rejected[0])
    (tmp_path / "iter_0000010" / "common.pt").unlink()
    with pytest.raises(CheckpointError, match="iter_0000020 is incomplete"):  # nothing is whole
        check_tracker(args)
    tracker.write_text("20")
    choice = chosen(args)
    assert choice.tag == "iter_0000020" and choice.record is None


# Against the arguments in the checkpoint


def layout(dp: int = 2, mbs: int = 2, **more: Any) -> Namespace:
    return Namespace(
        **{"load": "/ckpt", "data_parallel_size": dp, "micro_batch_size": mbs, "global_batch_size": 16} | more
    )


def test_no_arguments_came_back() -> None:
    with pytest.raises(CheckpointError, match="has no arguments"):
        checks.after_load(host_of(layout()), 10, None)


def test_batch_size_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, saved = layout(dp=4, global_batch_size=8), layout(dp=2, global_batch_size=4)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--micro-batch-size", "2"])
    with pytest.raises(UsageError) as error:
        checks.after_load(host_of(now), 10, saved)
    assert "--global-batch-size 4 to continue as before, or --global-batch-size 8" in str(error.value.action)
    assert "data-parallel size 2 -> 4" in str(error.value.found)
    for words in (["--global-batch-size", "8"], ["--global-batch-size=8"]):
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words])
        checks.after_load(host_of(now), 10, saved)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--yaml-cfg", "x"])
    config = tmp_path / "x.yaml"
    for text, fine in (("model:\n  global_batch_size: 8\n", True), ("global_batch_size: null\n", False)):
        config.write_text(text)
        now.yaml_cfg = str(config)
        if fine:
            checks.after_load(host_of(now), 10, saved)
        else:
            with pytest.raises(UsageError):
                checks.after_load(host_of(now), 10, saved)


def test_batch_size_of_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py"])
    checks.after_load(host_of(layout(dp=4)), 10, layout(dp=2))
    steps = {"global_batch_size": 8, "step_batch_size_schedule": "0:8"}
    checks.after_load(host_of(layout(**steps)), 10, layout(dp=2))


def cyclic(**more: Any) -> Namespace:
    return layout(**{"dataloader_type": "cyclic", "data_sharding": True} | more)


def test_cyclic_on_other_ranks() -> None:
    for changed in ({"dp": 4}, {"mbs": 1}, {"data_sharding": False}, {"dp": 4, "mbs": 1}):
        with pytest.raises(UsageError, match="deals out the samples in a different order") as error:
            checks.after_load(host_of(cyclic(**changed)), 10, cyclic())
        assert "2 data-parallel ranks with --micro-batch-size 2" in str(error.value.action)
    checks.after_load(host_of(cyclic()), 10, cyclic())
    with pytest.raises(UsageError, match="kind of sampler"):
        checks.after_load(host_of(cyclic()), 10, cyclic(dataloader_type="single"))
    with pytest.raises(UsageError, match="kind of sampler"):
        checks.after_load(host_of(cyclic(dataloader_type="single")), 10, cyclic())
    checks.after_load(host_of(cyclic(dp=4, dataloader_type="single")), 10, cyclic(dataloader_type="single"))


def test_cyclic_on_ranks_that_share_out_weights() -> None:
    """Since core 0.19: they read samples of their own, and ``args.data_parallel_size`` leaves them out."""
    shared = cyclic(dp=2, gtp_weight_remat_size=2)
    checks.after_load(host_of(shared), 10, cyclic(dp=4))
    with pytest.raises(UsageError, match="deals out the samples in a different order") as error:
        checks.after_load(host_of(shared), 10, cyclic(dp=2, gtp_weight_remat_size=1))
    assert "data-parallel size 4 x micro-batch size 2" in str(error.value.found)


# Iterations to skip


@pytest.mark.parametrize(
    ("before", "now", "ahead", "translated"),
    [("0.16.1", "0.17.0", 10, "9 11"), ("0.12.0", "0.19.0", 10, "9 11"), ("0.18.0", "0.16.0", 11, "7 10")],
)
def test_iterations_to_skip(before: str, now: str, ahead: int, translated: str) -> None:
    """0-based until 0.16, 1-based from 0.17 on. The list is that of the checkpoint: nobody has translated it."""

    def state(version: str, kind: str = "megatron-lm") -> Envelope:
        return Envelope(state=order_state({}, 80), iteration=10, framework=f"{kind} {version}")

    skips = Namespace(iterations_to_skip=[8, ahead])
    with pytest.raises(UsageError) as error:
        checks.after_restore(host_of(skips, version=now), state(before), skips)
    assert error.value.action == f"--iterations-to-skip {translated}"
    # nothing ahead; translated already; the same side; not known
    past = Namespace(iterations_to_skip=[8, ahead - 1])
    checks.after_restore(host_of(past, version=now), state(before), past)
    checks.after_restore(host_of(Namespace(iterations_to_skip=[9, 11]), version=now), state(before), skips)
    checks.after_restore(host_of(skips, version=before), state(before), skips)
    checks.after_restore(host_of(skips, version=now), state("unknown"), skips)
    checks.after_restore(host_of(skips, version=now), state(before, "megatron-deepspeed"), skips)
    none = Namespace(iterations_to_skip=[])
    checks.after_restore(host_of(none, version=now), state(before), none)
