"""What the plan says of a small run on disk, and that it says it fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaresume.batches.open import open_stream
from megaresume.checkpoint.save.commit import begin_save, commit_save
from megaresume.checkpoint.system import Topology
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.runs.plan.start import steps_until
from megaresume.stream.batches import BatchSchedule, end_of_run
from megaresume.stream.errors import MegaresumeError, StateError
from tests.cli.conftest import SavedRun, megaresume


def plan(run: SavedRun, *words: object) -> dict[str, Any]:
    """The JSON report, whose verdict the exit status agrees with."""
    done = megaresume("plan", run.save, "--json", *words)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["refused"] == bool(done.returncode)
    return report


def edited(run: SavedRun, **changes: Any) -> Path:
    """A data config with some keys changed."""
    mapping = yaml.safe_load(run.data.read_text())
    for key, value in changes.items():
        mapping[key] = mapping.get(key, {}) | value if isinstance(value, dict) else value
        if isinstance(mapping[key], dict):
            mapping[key] = {name: entry for name, entry in mapping[key].items() if entry is not None}
    path = run.data.with_name("new.yaml")
    path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    return path


def refusal(report: dict[str, Any]) -> dict[str, Any]:
    finding: dict[str, Any] = next(f for f in report["findings"] if f["kind"] == "refused")
    return finding


def raised(run: SavedRun, data: Path, on_change: Any) -> MegaresumeError:
    """What the stream itself says to a resume from the newest checkpoint."""
    state = open_stream(run.data).state_at(96, batches=[(0, 8)])
    with pytest.raises(StateError) as error:
        open_stream(data, state=state, on_change=on_change)
    return error.value


def test_nothing_changed(run: SavedRun) -> None:
    report = plan(run, "--train-iters", 100)
    assert report["verdict"] == "resumes" and report["findings"] == []
    assert (report["checkpoint"]["tag"], report["checkpoint"]["samples"]) == ("global_step12", 96)
    assert report["data"]["outcome"] == "nothing" and report["data"]["changes"] == []
    assert report["end"] == {"step": 100, "samples": 800} and report["end_with_the_batch_size_before"] is None
    assert plan(run)["end"] is None


@pytest.mark.process
def test_nothing_heavy_is_imported(run: SavedRun) -> None:
    code = (
        "import sys; from megaresume.program import main;"
        "main(['plan', sys.argv[1], '--data', sys.argv[2], '--on-change', 'stage', '--train-iters', '50']);"
        "print({'torch', 'numba', 'deepspeed', 'megatron'} & set(sys.modules), file=sys.stderr)"
    )
    data = edited(run, sources={"web": {"path": "corpora/web", "weight": 1}})
    done = subprocess.run([sys.executable, "-c", code, run.save, data], capture_output=True, text=True)
    assert done.stderr.strip() == "set()", done.stderr
    assert "in a new stage" in done.stdout


def test_what_balanced_ranks_gain(run: SavedRun) -> None:
    assert plan(run)["balance"] is None
    for objective in ("step", "micro-step"):
        gain = plan(run, "--balance", objective, "--dp", 4, "--micro-batch-size", 1)["balance"]
        assert gain["objective"] == objective and gain["steps"] == 20
        assert 1 <= gain["after"] <= gain["before"]
    assert (
        "times the work of the mean"
        in megaresume("plan", run.save, "--balance", "step", "--micro-batch-size", 1).stdout
    )
    assert "a whole number" in megaresume("plan", run.save, "--balance", "step", "--balance-token-cost", -1).stderr


def test_a_new_mixture(run: SavedRun) -> None:
    data = edited(run, sources={"web": {"path": "corpora/web", "weight": 0.2}})
    report = plan(run, "--data", data)
    error = raised(run, data, "refuse")
    assert report["headline"] == error.headline and refusal(report)["action"] == error.action
    assert report["data"]["changes"] == [{"field": "sources.web.weight", "before": 7, "after": 2}]
    assert "sources.web.weight 7 -> 2" in report["data"]["with_on_change_stage"][0]

    staged = plan(run, "--data", data, "--on-change", "stage", "--train-iters", 50)
    assert staged["data"]["outcome"] == "new stage" and not staged["refused"]
    stream = open_stream(data, state=open_stream(run.data).state_at(96, batches=[(0, 8)]), on_change="stage")
    assert staged["data"]["accepted"] == list(stream.accepted)
    assert [s["now" if "now" in s else "share"] for s in staged["sources"]] == [0.4, 0.6]


def test_stages_to_come_are_free(run: SavedRun) -> None:
    later = {"from_step": 40, "name": "anneal", "weights": {"web": 1, "code": 3}}
    report = plan(run, "--data", edited(run, stages=[later]))
    assert not report["refused"] and report["data"]["outcome"] == "nothing"
    assert report["data"]["stages_to_come"] == [{"name": "anneal", "from_step": 40}]
    assert report["data"]["accepted"] == ["at sample 96: the stages to come were changed"]


@pytest.mark.parametrize("on_change", ["refuse", "stage"])
@pytest.mark.parametrize(("change", "word"), [({"seed": 4}, "seed 4"), ({"sources": {"code": None}}, "code")])
def test_what_no_flag_accepts(run: SavedRun, on_change: str, change: dict[str, Any], word: str) -> None:
    data = edited(run, **change)
    report = plan(run, "--data", data, "--on-change", on_change)
    headlines = [f["headline"] for f in report["findings"] if f["kind"] == "refused"]
    assert headlines[0] == report["headline"] == raised(run, data, on_change).headline
    assert word in refusal(report)["found"]
    # What the flag would not solve either is said at once.
    assert raised(run, data, "stage").headline in headlines and report["data"]["with_on_change_stage"] is None


def test_a_corpus_that_changed(run: SavedRun, tmp_path: Path) -> None:
    text = tmp_path / "more.txt"
    text.write_text("\n\n".join(f"code {i} " + "y" * (i % 50) for i in range(130)))
    prepare([text], run.corpora / "code", PrepareOptions(text_unit="paragraph", workers=1, overwrite=True))
    report = plan(run, "--data", run.data)
    assert report["headline"] == "source 'code' is not the corpus that the state was made with"
    assert "code.documents 130" in refusal(report)["found"]
    # Not given, but where the run had it: found as well.
    assert plan(run)["refused"]


def test_corpora_that_are_elsewhere(run: SavedRun) -> None:
    run.corpora.rename(run.corpora.with_name("moved"))
    report = plan(run)
    assert not report["refused"] and report["data"]["config"] is None, "the launch may know where they are"
    assert any(f["kind"] == "note" for f in report["findings"])
    assert plan(run, "--data", run.data)["refused"]


def test_batches_that_do_not_divide(run: SavedRun) -> None:
    report = plan(run, "--dp", 3, "--micro-batch-size", 2)
    assert report["headline"] == "the global batch does not divide over the ranks"
    assert refusal(report)["action"] == "--global-batch-size 6 or 12"
    assert not plan(run, "--dp", 3, "--micro-batch-size", 2, "--global-batch-size", 12)["refused"]
    ramp = ("--rampup-batch-size", 4, 4, 400, "--global-batch-size", 16, "--micro-batch-size", 4)
    assert not plan(run, *ramp, "--dp", 1)["refused"]
    assert plan(run, *ramp, "--dp", 2)["refused"], "12 samples come, in the middle of the ramp-up"
    assert not plan(run, *ramp, "--dp", 2, "--micro-batch-size", 2)["refused"]


def test_nodes(run: SavedRun) -> None:
    done = megaresume("plan", run.save, "--nodes", 2)
    assert done.returncode == 2 and "--dp D in place of --nodes" in done.stderr
    stream = open_stream(run.data)
    topology = Topology(dp=4, tp=2, world_size=8, nodes=2, micro_batch_size=1, global_batch_size=8)
    pending = begin_save(
        run.save, tag="global_step16", iteration=16, state=stream.state_at(128, batches=[(0, 8)]), topology=topology
    )
    (run.save / "global_step16").mkdir()
    (run.save / "global_step16" / "mp_rank_00_model_states.pt").write_bytes(b"weights")
    commit_save(pending, expected_files=["mp_rank_00_model_states.pt"])
    report = plan(run, "--nodes", 3)
    assert report["layout"]["now"]["dp"] == 6 and report["layout"]["now"]["world_size"] == 12
    assert report["headline"] == "the global batch does not divide over the ranks"
    assert not plan(run, "--nodes", 4)["refused"]
    text = megaresume("plan", run.save, "--dp", 8).stdout
    assert "nodes 2->not known  dp 4->8" in text and "None" not in text


def test_steps_move_with_the_batch_size(run: SavedRun) -> None:
    report = plan(run, "--global-batch-size", 16, "--train-samples", 1000)
    # 12 steps of 8; 904 samples are left: 57 steps of 16, the last one beyond the end
    assert report["end"] == {"step": 69, "samples": 96 + 57 * 16}
    assert report["end_with_the_batch_size_before"] == {"step": 125, "samples": 1000}
    assert report["batches"] == [[0, 8], [96, 16]]
    report = plan(run, "--global-batch-size", 16, "--train-iters", 125)
    assert report["end"] == {"step": 125, "samples": 96 + 113 * 16}


def test_a_run_that_is_over(run: SavedRun) -> None:
    for flags in (("--train-iters", 12), ("--train-samples", 96)):
        report = plan(run, *flags)
        assert report["verdict"] == "finished" and not report["refused"]
        assert report["findings"][0]["action"].endswith(f"above {flags[1]}")
    assert plan(run, "--train-samples", 97)["end"] == {"step": 13, "samples": 104}


def test_step_counts_against_counting() -> None:
    schedule = BatchSchedule(((0, 4), (20, 8), (52, 16)))
    for sample, step in ((0, 0), (8, 2), (28, 6)):
        ends = [schedule.after(sample, n) for n in range(40)]
        for target in range(sample, 300):
            assert steps_until(schedule, sample, target) == sum(end <= target for end in ends[1:]), (sample, target)
            if target > sample:
                n = next(n for n, end in enumerate(ends) if end >= target)
                assert end_of_run(schedule, step, sample, train_iters=None, train_samples=target) == (step + n, ends[n])
        assert end_of_run(schedule, step, sample, train_iters=step + 9, train_samples=None) == (step + 9, ends[9])


@pytest.mark.parametrize("policy", ["stop", "drop"])
def test_a_stream_that_ends(run: SavedRun, policy: str) -> None:
    ends = {"max_epochs": 2, "on_exhausted": policy}
    sources = {
        "web": {"path": "corpora/web", "weight": 0.7} | ends,
        "code": {"path": "corpora/code", "weight": 0.3} | ends,
    }
    data = edited(run, sources=sources)
    report = plan(run, "--data", data, "--on-change", "stage", "--train-iters", 10_000)
    stream = open_stream(data, state=open_stream(run.data).state_at(96, batches=[(0, 8)]), on_change="stage")
    with pytest.raises(MegaresumeError) as error:
        stream.plan(96, 80_000)
    assert f"at most {report['stream_ends']} samples" == error.value.expected
    last = report["stream_ends"] // 8
    assert report["end"] == {"step": last, "samples": 8 * last}
    warning = next(f for f in report["findings"] if f["headline"] == "the stream ends before the run does")
    assert warning["action"].startswith(f"--train-iters {last}, or")
    fitting = plan(run, "--data", data, "--on-change", "stage", "--train-iters", last)
    assert fitting["stream_ends"] is None and fitting["findings"] == []
    # Without the length of the run, its end is that of the stream: no warning.
    (end,) = plan(run, "--data", data, "--on-change", "stage")["findings"]
    assert end["kind"] == "note"
    assert end["headline"] == f"the stream ends at sample {report['stream_ends']:,}, after {last} whole steps"


def test_epochs_left(run: SavedRun) -> None:
    """The estimates against the stream itself: within some per cent."""
    report = plan(run, "--train-iters", 60)
    stream = open_stream(run.data)
    for source in report["sources"]:
        state = stream.state_at(source["sample"])
        assert state.sources[source["name"]].epochs == pytest.approx(1, rel=0.15)
        end = stream.state_at(480)
        assert source["epochs_at_end"] == pytest.approx(end.sources[source["name"]].epochs, rel=0.1)
        assert source["epochs_left"] is None and source["step"] == source["sample"] // 8


def test_which_checkpoint(run: SavedRun) -> None:
    assert plan(run, "--ckpt-step", 4)["checkpoint"]["tag"] == "global_step4"
    missing = plan(run, "--ckpt-step", 5)
    assert missing["headline"] == "there is no checkpoint of iteration 5" and missing["checkpoint"] is None
    (run.save / "global_step12" / "mp_rank_00_model_states.pt").write_bytes(b"half")
    report = plan(run)
    assert report["checkpoint"]["tag"] == "global_step8" and report["checkpoint"]["samples"] == 64
    assert [r["tag"] for r in report["checkpoint"]["rejected"]] == ["global_step12"]
    assert "has 4 bytes" in megaresume("plan", run.save).stdout


def test_a_checkpoint_without_state(run: SavedRun, tmp_path: Path) -> None:
    import shutil

    shutil.rmtree(run.save / "megaresume")
    report = plan(run)
    assert report["headline"] == "the checkpoint has no data state" and report["refused"]


def test_nothing_there(run: SavedRun, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = megaresume("plan", tmp_path / "empty")
    assert done.returncode == 0 and done.stdout.startswith("NOTHING TO RESUME")


@pytest.mark.parametrize(
    "words",
    [
        ("/nowhere",),
        ("{save}/global_step12",),
        ("{save}", "--data", "nowhere.yaml"),
        ("{save}", "--train-iters", "5", "--train-samples", "40"),
        ("{save}", "--dp", "0"),
        ("{save}", "--on-change", "maybe"),
        ("{save}", "--split", "a"),
        ("{save}", "--split", ""),
        ("{save}", "--num-workers", "-1"),
    ],
)
def test_bad_usage(run: SavedRun, words: tuple[str, ...]) -> None:
    done = megaresume("plan", *(word.format(save=run.save) for word in words))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout


def test_the_text_begins_with_the_verdict(run: SavedRun) -> None:
    done = megaresume("plan", run.save, "--train_iters", 100, "--global_batch_size", 16)
    assert done.stdout.startswith(
        "OK: resumes from global_step12 at step 12, sample 96, and ends at step 100, sample 1,504"
    )
    assert "gbs 8->16" in done.stdout and "repeated" not in done.stdout
    refused = megaresume("plan", run.save, "--seed", 5)
    assert refused.returncode == 1 and "seed  3 -> 5" in refused.stdout
    refused = megaresume("plan", run.save, "--seq-length", 128)
    assert refused.returncode == 1 and refused.stdout.startswith("REFUSED: the data config is not the one")
    assert "seq_length  64 -> 128" in refused.stdout


def test_skips_are_judged_as_in_the_launch(run: SavedRun) -> None:
    """Beyond the end of the run, beyond the end of a source: refused; without the end, nobody can know."""
    late = edited(run, skip={"samples": ["800:900"]})
    assert "skip is beyond the end" in plan(run, "--data", late, "--train-iters", 100)["headline"]
    assert not plan(run, "--data", late, "--train-iters", 101)["refused"]
    assert not plan(run, "--data", late)["refused"]
    report = plan(run, "--data", edited(run, skip={"documents": {"web": [300]}}))
    assert refusal(report)["found"] == "skip of web:300" and report["data"]["with_on_change_stage"] is None
    inside = edited(run, skip={"documents": {"web": [299]}})
    assert plan(run, "--data", inside)["findings"][0]["headline"] == "skip web:299 from sample 96 on"


def test_flags_that_skip(run: SavedRun) -> None:
    steps = ("--skip_train_iteration_range", "21-22")
    report = plan(run, "--megaresume-skip-samples", "120:130", *steps, "--train-iters", 100)
    assert [f["headline"] for f in report["findings"]] == [
        "skip samples 120 to 129 (10 samples)",
        "skip steps 21 to 22 (samples 160 to 175; 16 samples)",
    ]
    beyond = plan(run, "--skip-train-iteration-range", "101-102", "--train-iters", 100)
    assert refusal(beyond)["found"] == "skip of steps 101 to 102"
    done = megaresume("plan", run.save, "--skip-samples", "9:4")
    assert done.returncode == 2 and 'for example "4:9"' in done.stderr
