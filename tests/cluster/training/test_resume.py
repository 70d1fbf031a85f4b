"""The main job: trained, killed with SIGKILL, resumed on the same and on another topology, compared with its twin."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest

from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.checkpoint.starts import NOTHING_TO_TRAIN
from megaresume.cluster.processes import LocalJob
from tests.cluster.training.compare import compare
from tests.release import release

BITS = ("samples", "order", "content", "digest", "loss_hex")
SIZES = "--train-iters 6 --global-batch-size 8 --micro-batch-size 2"


def assert_close_losses(one: Any, other: Any) -> None:
    """Equal up to the order of sums."""
    for step, record in one.steps.items():
        assert record["loss"] == pytest.approx(other.steps[step]["loss"], rel=1e-5), step


@pytest.fixture(scope="module")
def twins(runs: Any) -> dict[int, Any]:
    """By ZeRO stage: an uninterrupted run that saves at 2, 4, 6."""
    done: dict[int, Any] = {}

    def of(stage: int) -> Any:
        if stage not in done:
            untied = " --untie-embeddings-and-output-weights" if stage == 3 else ""
            flags = f"{SIZES} --zero-stage {stage} --save {{dir}}/twin{stage} --save-interval 2{untied}"
            done[stage] = runs(f"twin{stage}", flags + (" --eval-iters 2 --eval-interval 3" if stage == 0 else ""))
            assert done[stage].status == 0, done[stage].text[-4000:]
        return done[stage]

    return type("Twins", (dict,), {"__missing__": lambda self, stage: of(stage)})()


@release(
    "four launches each",
    "`::test_killed_and_resumed_on_other_topologies`, "
    "`tests/hosts/test_deepspeed.py::test_a_resume_continues_bit_for_bit`: all four ZeRO stages",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_killed_and_resumed_twice_on_the_same_topology(runs: Any, twins: Any, stage: int) -> None:
    twin = twins[stage]
    untied = " --untie-embeddings-and-output-weights" if stage == 3 else ""
    flags = f"{SIZES} --zero-stage {stage} --save {{dir}}/same{stage} --save-interval 2{untied}"
    # As if the twin had been killed behind step 2.
    first = runs(f"same{stage}", flags + f" --load {{dir}}/twin{stage} --ckpt-step 2", kill_after=5)
    second = runs(f"same{stage}", flags + f" --load {{dir}}/same{stage}")
    assert second.status == 0, second.text[-4000:]
    assert "resumed at sample 16 |" in first.resumed and "step 2 from global_step2" in first.resumed
    assert "resumed at sample 32 |" in second.resumed
    for line in (first.resumed, second.resumed):
        assert re.search(r"\| dp 2->2 workers 0->0 mbs 2->2 gbs 8->8 \| repeated 0 skipped 0 \|", line)
    records = second.records
    assert [entry["step"] for entry in records.lost] == [5]
    for step in (3, 4, 5, 6):
        for field in BITS:
            assert records.steps[step][field] == twin.records.steps[step][field], (step, field)
    # What was trained, lost to the kill and trained again is the same, bit for bit.
    assert all(records.lost[0][field] == records.steps[5][field] for field in BITS)


def test_killed_and_resumed_on_other_topologies(runs: Any, twins: Any) -> None:
    flags = "--train-iters 6 --global-batch-size 8 --save {dir}/other --load {dir}/other --save-interval 2"
    whole = runs("other", flags + " --micro-batch-size 2", kill_after=3, launcher="torchrun")
    one = runs(
        "other",
        flags + " --micro-batch-size 4 --num-workers 1 --megaresume-start-method spawn --megaresume-prefetch 1",
        num_processes=1,
        kill_after=5,
    )
    last = runs("other", flags + " --micro-batch-size 1 --megaresume-prefetch 0", launcher="deepspeed")
    assert last.status == 0, last.text[-4000:]
    assert "no checkpoint in" in whole.text
    assert "| dp 2->1 workers 0->1 mbs 2->4 gbs 8->8 | repeated 0 skipped 0 |" in one.resumed
    assert "| dp 1->2 workers 1->0 mbs 4->1 gbs 8->8 | repeated 0 skipped 0 |" in last.resumed
    # Every global batch, down to the last token, label and position.
    assert compare(last.records, twins[0].records) is None
    assert_close_losses(last.records, twins[0].records)
    assert [start["attempt"] for start in last.records.starts] == [1, 2, 3]

    # A finished run, started again: nothing is trained, nothing written, exit status 0.
    again = runs("other", flags + " --micro-batch-size 2", num_processes=1)
    assert again.status == 0
    assert "the run is over: 6 steps, 48 samples trained" in again.text
    assert again.records.steps == last.records.steps
    ledger = read_ledger(ledger_path(runs.directory / "other")).entries
    # It is no start that led to no save: a longer --train-iters may follow however many of them.
    assert [NOTHING_TO_TRAIN in entry.details for entry in ledger if entry.kind == "start"] == [False] * 3 + [True]
    # Said by the starts that reached the end, and by no other.
    kinds = [entry.kind for entry in ledger if entry.kind not in ("checkpoint", "durable")]
    assert kinds == ["start"] * 3 + ["finished", "start", "finished"]
    assert [(entry.iteration, entry.samples) for entry in ledger if entry.kind == "finished"] == [(6, 48)] * 2


def test_validation_is_the_same_samples_in_any_layout(runs: Any, twins: Any) -> None:
    twin = twins[0].records
    assert sorted(twin.validations["valid"]) == [3, 6]
    flags = "--train-iters 6 --global-batch-size 8 --micro-batch-size 4 --eval-iters 2 --skip-train"
    flags += " --load {dir}/twin0 --save {dir}/validation"
    alone = runs("validation", flags, num_processes=1).records.validations["valid"]
    assert alone[6]["tokens"] == twin.validations["valid"][6]["tokens"]
    assert alone[6]["digest"] == twin.validations["valid"][3]["digest"] == twin.validations["valid"][6]["digest"]
    assert alone[6]["loss"] == pytest.approx(twin.validations["valid"][6]["loss"], rel=1e-6)
    # To the launch scripts such a run is over if it ends well; the ledger does not say that the training is.
    (start,) = read_ledger(ledger_path(runs.directory / "validation")).entries
    assert (start.kind, start.iteration, start.details[NOTHING_TO_TRAIN]) == ("start", 6, True)


def test_the_end_is_that_of_the_batch_sizes_that_were(runs: Any, twins: Any) -> None:
    """Sample 50 lies in the run: 6 steps of 8 samples, then 2 of 4, of which it is left out."""
    assert twins[0].records.steps
    flags = "--train-iters 8 --global-batch-size 4 --micro-batch-size 2 --load {dir}/twin0"
    done = runs("end", flags + " --megaresume-skip-samples 50:51", num_processes=1)
    assert done.status == 0, done.text[-4000:]
    assert "at sample 48: skip samples 50 to 50 (1 samples)" in done.text


def test_tensor_parallel(runs: Any, twins: Any) -> None:
    """Ranks that share a layer get the same samples; weights do not depend on how they are cut."""
    flags = f"{SIZES} --tensor-model-parallel-size 2 --save {{dir}}/tp --load {{dir}}/tp --save-interval 2"
    runs("tp", flags, kill_after=3)
    done = runs("tp", flags)
    assert done.status == 0, done.text[-4000:]
    assert "| dp 1->1 " in done.resumed
    assert compare(done.records, twins[0].records) is None
    assert_close_losses(done.records, twins[0].records)


def test_ramp_up_by_megatrons_flag(runs: Any, twins: Any) -> None:
    flags = "--train-samples 48 --global-batch-size 8 --micro-batch-size 2 --rampup-batch-size 4 4 8"
    flags += " --save {dir}/ramp --load {dir}/ramp --save-interval 1 --bf16 --zero-stage 1"
    runs("ramp", flags, num_processes=1, kill_after=2)
    done = runs("ramp", flags, num_processes=1)
    assert done.status == 0, done.text[-4000:]
    sizes = [record["global_batch_size"] for _, record in sorted(done.records.steps.items())]
    assert sizes == sorted(sizes) and set(sizes) == {4, 8} and sum(sizes) == 48
    # The order of samples is that of the run without a ramp-up.
    assert done.records.steps[max(done.records.steps)]["digest"] == twins[0].records.steps[6]["digest"]


def test_terminated_saves_and_ends(runs: Any) -> None:
    flags = "--train-iters 100000 --global-batch-size 4 --micro-batch-size 2 --exit-signal-handler --save {dir}/term"
    flags += " --save-interval 1 --megaresume-keep-last 2 --megaresume-stop-status 0"

    def terminate(job: LocalJob) -> None:
        assert job.wait_until(lambda: " iteration        3/" in job.text(), timeout=300)
        for process in job._processes:
            os.kill(process.pid, signal.SIGTERM)

    done = runs("term", flags, num_processes=1, during=terminate)
    assert done.status == 0, done.text[-4000:]
    last = max(done.records.steps)
    assert (runs.directory / "term" / "latest").read_text() == f"global_step{last}"
    assert f"SIGTERM received: saved at step {last}; exits with status 0, not finished" in done.text
    # Behind every save the older ones go: the two newest are left, and the records of all.
    kept = sorted(path.name for path in (runs.directory / "term").glob("global_step*"))
    assert kept == sorted(f"global_step{step}" for step in (last - 1, last))
    assert len(list((runs.directory / "term" / "megaresume").glob("step_*.manifest.json"))) == last
