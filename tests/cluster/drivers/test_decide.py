"""Every way in which an attempt ends, and what follows; what was seen on a cluster before it was decided says so."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from megaresume.cluster.drivers.decide import (
    Action,
    AttemptHistory,
    AttemptProgress,
    BadNode,
    SlurmState,
    Status,
    choose_nodes,
    decide,
    decide_start,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "slurm.md"

N2 = BadNode(name="n2", why="rank 3 failed first")
SAVED = AttemptProgress(saved=160)
NOTHING = AttemptProgress()


@dataclass(frozen=True, kw_only=True)
class Case:
    what: str
    then: Action
    #: a part of the reason.
    why: str
    status: Status = field(default_factory=lambda: Status(exit=0))
    signal: str | None = None
    slurm: SlurmState = field(default_factory=SlurmState)
    progress: AttemptProgress = NOTHING
    history: AttemptHistory = field(default_factory=AttemptHistory)
    #: attempts in a row without a new checkpoint, and nodes left out, from then on.
    fruitless: int = 0
    exclude: tuple[str, ...] = ()
    #: a test on a real Slurm of four nodes on one machine in which it was seen.
    seen: str = ""


FAILED = Status(exit=1, rank_exit=1, error="RuntimeError: no luck", bad_nodes=(N2,))
NO_REQUEUE = SlurmState(may_requeue=False)
CHAIN = SlurmState(may_requeue=False, successor="4712")

CASES = [
    # ---- the run is over: only if it says so
    Case(
        what="the run comes to its end",
        seen="test_a_signal_a_requeue_a_cancel_and_the_end",
        progress=AttemptProgress(finished=3000, saved=3000),
        then="finish",
        why="after step 3000",
    ),
    Case(
        what="a finished run that is launched again",
        progress=AttemptProgress(finished=3000),
        then="finish",
        why="after step 3000",
    ),
    Case(
        what="an error after the end of the run",
        status=FAILED,
        progress=AttemptProgress(finished=8),
        then="finish",
        why="step 8",
    ),
    Case(
        what="the end of the run in the seconds before the time limit",
        slurm=SlurmState(reason="time limit"),
        progress=AttemptProgress(finished=8, saved=8),
        then="finish",
        why="step 8",
    ),
    Case(
        what="slurmd of the batch node dies, and srun ends with 0",
        seen="slurmd_of_the_only_node",
        progress=SAVED,
        then="requeue",
        why="step 160",
    ),
    Case(
        what="the same, before the first save", then="requeue", why="not said that it is over, attempt 1", fruitless=1
    ),
    Case(
        what="status 0 without a new checkpoint, again and again",
        seen="test_without_progress_it_comes_to_an_end_whatever_ends_it",
        history=AttemptHistory(fruitless=3),
        then="refuse",
        why="attempt 4 in a row without a new checkpoint, MAX_RESTARTS=3",
        fruitless=4,
    ),
    # ---- stopped
    Case(
        what="USR1, and the ranks have saved",
        seen="test_a_signal_a_requeue_a_cancel_and_the_end",
        signal="USR1",
        progress=SAVED,
        then="requeue",
        why="stopped by USR1, new checkpoint at",
    ),
    Case(what="USR1 before the first step", signal="USR1", then="requeue", why="attempt 1 in a row", fruitless=1),
    Case(
        what="a preemption that USR1 announces before the first step, however often",
        seen="test_a_preemption_before_the_first_step_does_not_count",
        signal="USR1",
        slurm=SlurmState(preempting=True),
        history=AttemptHistory(fruitless=3),
        then="requeue",
        why="stopped by USR1 (preemption), no new checkpoint, which does not count",
        fruitless=3,
    ),
    Case(
        what="such a preemption, and a rank fails",
        signal="USR1",
        status=FAILED,
        slurm=SlurmState(preempting=True),
        history=AttemptHistory(fruitless=3),
        then="refuse",
        why="failed with status 1 after USR1, attempt 4 in a row",
        fruitless=4,
    ),
    Case(
        what="USR1, and a rank fails in its save",
        signal="USR1",
        status=FAILED,
        then="requeue",
        why="failed with status 1 after USR1",
        fruitless=1,
    ),
    Case(
        what="the job is cancelled",
        slurm=SlurmState(reason="cancelled"),
        then="refuse",
        why="was cancelled",
        fruitless=1,
    ),
    Case(
        what="the job is cancelled after a save",
        seen="test_a_signal_a_requeue_a_cancel_and_the_end",
        slurm=SlurmState(reason="cancelled"),
        progress=SAVED,
        then="refuse",
        why="was cancelled",
    ),
    Case(
        what="the time limit, and the ranks have saved",
        slurm=SlurmState(reason="time limit"),
        progress=SAVED,
        then="requeue",
        why="time limit",
    ),
    Case(
        what="a time limit before any progress, MAX_RESTARTS=0",
        seen="without_training",
        slurm=SlurmState(reason="time limit"),
        history=AttemptHistory(max_restarts=0),
        then="refuse",
        why="attempt 1 in a row",
        fruitless=1,
    ),
    Case(
        what="a hang until the time limit, more often than MAX_RESTARTS",
        slurm=SlurmState(reason="time limit"),
        history=AttemptHistory(fruitless=3),
        then="refuse",
        why="attempt 4 in a row",
        fruitless=4,
    ),
    Case(
        what="preempted before the first save, however often",
        slurm=SlurmState(reason="preemption", requeued=True),
        history=AttemptHistory(fruitless=3),
        then="requeue",
        why="preemption",
        fruitless=3,
    ),
    Case(
        what="`scontrol requeue`",
        seen="nine_stops",
        slurm=SlurmState(reason="requeue", requeued=True),
        progress=SAVED,
        then="requeue",
        why="(requeue)",
    ),
    Case(
        what="a node is lost: Slurm queues the job again itself, and the next start counts the attempt",
        slurm=SlurmState(reason="node failure", requeued=True),
        history=AttemptHistory(fruitless=3),
        then="requeue",
        why="node failure",
        fruitless=4,
    ),
    Case(
        what="the same: a node that Slurm has taken away is not left out as well",
        slurm=SlurmState(reason="node failure", other_nodes=4),
        status=FAILED,
        then="requeue",
        why="node failure",
        fruitless=1,
    ),
    # ---- failed
    Case(
        what="a rank dies",
        seen="nine_stops",
        status=FAILED,
        progress=SAVED,
        then="requeue",
        why="failed with status 1, new checkpoint",
    ),
    Case(
        what="a rank dies before the first save",
        seen="test_failures_without_progress_come_to_an_end",
        status=FAILED,
        then="requeue",
        why="attempt 1 in a row",
        fruitless=1,
    ),
    Case(
        what="the same for the fourth time in a row",
        seen="test_failures_without_progress_come_to_an_end",
        status=FAILED,
        history=AttemptHistory(fruitless=3),
        then="refuse",
        why="failed with status 1, attempt 4 in a row without a new checkpoint, MAX_RESTARTS=3",
        fruitless=4,
    ),
    Case(
        what="the launcher is killed (SIGKILL)",
        seen="nine_stops",
        status=Status(exit=137),
        progress=SAVED,
        then="requeue",
        why="status 137",
    ),
    Case(
        what="a rank dies after a new checkpoint: attempts are counted from 1 again",
        status=FAILED,
        progress=SAVED,
        history=AttemptHistory(fruitless=3),
        then="requeue",
        why="",
    ),
    Case(
        what="checkpoints of another job in the same directory are no progress",
        seen="two_jobs_of_one_name",
        status=FAILED,
        history=AttemptHistory(fruitless=1),
        then="requeue",
        why="attempt 2",
        fruitless=2,
    ),
    # ---- what cannot work
    Case(
        what="a mistake in the flags", status=Status(exit=2), then="refuse", why="a mistake in the flags", fruitless=1
    ),
    Case(
        what="the same under torchrun, which turns the rank's status 2 into 1",
        seen="without_training",
        status=Status(exit=1, rank_exit=2),
        then="refuse",
        why="failed with status 1 (2 of the rank that failed first): a mistake",
        fruitless=1,
    ),
    Case(
        what="the training script is missing on one node alone",
        seen="test_a_node_without_the_script_is_left_out",
        status=Status(exit=1, rank_exit=2, bad_nodes=(N2,), of_node=True),
        slurm=SlurmState(other_nodes=1),
        then="requeue",
        why="failed with status 1 (2 of the rank that failed first), attempt 1",
        fruitless=1,
        exclude=("n2",),
    ),
    Case(
        what="status 2 of srun, for a rank that died of something else",
        status=Status(exit=2, rank_exit=139),
        then="requeue",
        why="",
        fruitless=1,
    ),
    Case(
        what="status 2 after new checkpoints: no mistake in the flags",
        status=Status(exit=2),
        progress=SAVED,
        then="requeue",
        why="",
    ),
    # ---- chains
    Case(
        what="USR1 in a chain of jobs",
        seen="a_chain",
        signal="USR1",
        slurm=CHAIN,
        progress=SAVED,
        then="chain",
        why="stopped by USR1, new checkpoint",
    ),
    Case(
        what="the same in the last job of the chain",
        seen="test_a_chain_whose_length_stands_in_the_script_comes_to_an_end",
        signal="USR1",
        slurm=NO_REQUEUE,
        progress=SAVED,
        then="refuse",
        why="no job follows",
    ),
    Case(
        what="a chain without new checkpoints",
        slurm=CHAIN,
        history=AttemptHistory(fruitless=3),
        then="refuse",
        why="",
        fruitless=4,
    ),
    Case(
        what="the end of the run in a chain",
        seen="test_a_signal_a_requeue_a_cancel_and_the_end",
        slurm=CHAIN,
        progress=AttemptProgress(finished=8),
        then="finish",
        why="step 8",
    ),
    # ---- bad nodes
    Case(
        what="a rank dies on a bad node, and a healthy node is idle",
        seen="test_a_bad_node_is_left_out_and_only_a_run_that_says_so_is_over",
        status=FAILED,
        slurm=SlurmState(other_nodes=1),
        then="requeue",
        why="",
        fruitless=1,
        exclude=("n2",),
    ),
    Case(
        what="the same without another node: the bad one stays",
        status=FAILED,
        slurm=SlurmState(other_nodes=0),
        then="requeue",
        why="",
        fruitless=1,
    ),
    Case(
        what="the same with EXCLUDE_NODES nodes left out already",
        status=FAILED,
        slurm=SlurmState(other_nodes=5),
        history=AttemptHistory(excluded=("n5", "n6")),
        then="requeue",
        why="",
        fruitless=1,
    ),
    Case(
        what="the same with EXCLUDE_NODES=0",
        status=FAILED,
        slurm=SlurmState(other_nodes=5),
        history=AttemptHistory(max_excluded=0),
        then="requeue",
        why="",
        fruitless=1,
    ),
    Case(
        what="the data is missing on one node",
        seen="test_a_node_that_lacks_the_data_is_left_out",
        status=Status(exit=1, unchecked=True, bad_nodes=(BadNode(name="n3", why="no /data/web.bin"),)),
        slurm=SlurmState(other_nodes=2),
        then="requeue",
        why="nodes failed their check: n3: no /data/web.bin",
        fruitless=1,
        exclude=("n3",),
    ),
    Case(
        what="no node answers its check",
        status=Status(exit=1, unchecked=True, error="no node has answered: srun: error: launch failed"),
        slurm=SlurmState(other_nodes=2),
        then="requeue",
        why="nodes failed their check: no node has answered: srun: error: launch failed, attempt 1",
        fruitless=1,
    ),
    Case(
        what="cancelled while the nodes check themselves",
        status=Status(exit=1),
        signal="TERM",
        slurm=SlurmState(reason="cancelled", other_nodes=2),
        then="refuse",
        why="cancelled",
        fruitless=1,
    ),
    Case(
        what="three nodes fail their check, and one may be left out",
        status=Status(exit=1, unchecked=True, bad_nodes=tuple(BadNode(name=f"n{k}", why="full") for k in (1, 2, 3))),
        slurm=SlurmState(other_nodes=9),
        history=AttemptHistory(excluded=("n7",)),
        then="requeue",
        why="n3: full",
        fruitless=1,
        exclude=("n1",),
    ),
    Case(
        what="a rank dies on a bad node in a chain",
        status=FAILED,
        slurm=SlurmState(may_requeue=False, successor="4712", other_nodes=1),
        then="chain",
        why="",
        fruitless=1,
        exclude=("n2",),
    ),
    # ---- spare nodes in the job: nobody waits in the queue
    Case(
        what="a rank dies, and there is a spare node",
        seen="test_a_spare_node_takes_the_place_of_a_bad_one_in_the_same_job",
        status=FAILED,
        slurm=SlurmState(spares=0, other_nodes=2),
        progress=SAVED,
        then="again",
        why="failed with status 1, new checkpoint at step 160",
        exclude=("n2",),
    ),
    Case(
        what="a node fails its check, and there is a spare node",
        seen="test_a_spare_node_takes_the_place_of_a_bad_one_in_the_same_job",
        status=Status(exit=1, bad_nodes=(BadNode(name="n2", why="full"),), unchecked=True),
        slurm=SlurmState(spares=1),
        then="again",
        why="n2: full, attempt 1",
        fruitless=1,
        exclude=("n2",),
    ),
    Case(
        what="a node loses its power, and there is a spare node",
        seen="a_spare_node",
        status=Status(exit=0, bad_nodes=(BadNode(name="n2", why="Slurm has lost it"),)),
        slurm=SlurmState(spares=0),
        progress=SAVED,
        then="again",
        why="not said that it is over, new checkpoint at step 160",
        exclude=("n2",),
    ),
    Case(
        what="a rank dies, and no spare node is left",
        seen="a_spare_node",
        status=FAILED,
        slurm=SlurmState(spares=-1, other_nodes=1),
        then="requeue",
        why="attempt 1",
        fruitless=1,
        exclude=("n2",),
    ),
    Case(
        what="a rank dies for the fourth time, in one job or several",
        status=FAILED,
        slurm=SlurmState(spares=2),
        history=AttemptHistory(fruitless=3),
        then="refuse",
        why="attempt 4",
        fruitless=4,
    ),
    Case(
        what="USR1, and a rank fails in its save: the job is about to end",
        status=FAILED,
        signal="USR1",
        slurm=SlurmState(spares=2),
        then="requeue",
        why="after USR1",
        fruitless=1,
    ),
    Case(
        what="the time limit, with spare nodes",
        slurm=SlurmState(reason="time limit", spares=2),
        progress=SAVED,
        then="requeue",
        why="time limit",
    ),
    Case(
        what="a mistake in the flags, with spare nodes",
        status=Status(exit=1, rank_exit=2),
        slurm=SlurmState(spares=2),
        then="refuse",
        why="a mistake in the flags",
        fruitless=1,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.what for case in CASES])
def test_a_decision(case: Case) -> None:
    decision = decide(case.status, case.signal, case.slurm, case.progress, case.history)
    assert decision.action == case.then, decision
    assert case.why in decision.why
    assert "\n" not in decision.why
    assert tuple(node.name for node in decision.exclude) == case.exclude
    if case.then != "finish":
        assert decision.fruitless == case.fruitless


def test_no_sequence_of_ends_goes_on_for_ever() -> None:
    """Whatever ends attempts without progress, unless it comes from outside, the run stops being queued."""
    outside = [case for case in CASES if case.slurm.reason in ("preemption", "requeue") or case.slurm.preempting]
    ends = [case for case in CASES if case.progress == NOTHING and case not in outside]
    for case in ends:
        fruitless = 0
        for _ in range(5):
            history = AttemptHistory(fruitless=fruitless)
            if decide_start(history) is not None:
                break
            decision = decide(case.status, case.signal, case.slurm, case.progress, history)
            fruitless = decision.fruitless
            if decision.action == "refuse":
                break
        else:
            pytest.fail(case.what)


def test_a_job_that_begins_at_the_same_step_again_and_again_is_not_queued_for_ever() -> None:
    """`--ckpt-step 20`: to step 461, then from 20 to 172 each time; further than before is progress."""
    history, actions = AttemptHistory(), []
    for saved in (461, 172, 172, 500, 172, 172, 172, 172, 172):
        decision = decide(Status(exit=1), None, SlurmState(), AttemptProgress(saved=saved), history)
        history = replace(history, fruitless=decision.fruitless, best=decision.best)
        actions.append((decision.action, decision.fruitless, decision.best))
    assert [best for *_, best in actions] == [461, 461, 461, 500, 500, 500, 500, 500, 500]
    assert [fruitless for _, fruitless, _ in actions] == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert [action for action, *_ in actions] == ["requeue"] * 7 + ["refuse"] * 2
    assert "step 172, where one has come to 500" in decision.why


def test_what_slurm_itself_brought_back_once_too_often_does_not_begin() -> None:
    assert decide_start(AttemptHistory(fruitless=3)) is None
    refused = decide_start(AttemptHistory(fruitless=4))
    assert refused is not None and refused.action == "refuse" and "4 attempts in a row" in refused.why


@pytest.mark.parametrize(
    ("nodes", "wanted", "failed", "chosen"),
    [
        ("n1 n2 n3", 2, "", "n1 n2"),
        ("n1 n2 n3", 2, "n1", "n2 n3"),
        ("n1 n2 n3", 2, "n2", "n1 n3"),  # in Slurm's order: the first one has number 0
        ("n1 n3", 2, "n2", "n1 n3"),  # n2 is dead, and not the job's any more
        ("n1 n2 n3 n4", 2, "n1 n4", "n2 n3"),
        ("n1 n2 n3", 2, "n1 n2", "n1 n3"),  # rather one that has failed than no training
        ("n1", 2, "", "n1"),
    ],
)
def test_the_nodes_that_train(nodes: str, wanted: int, failed: str, chosen: str) -> None:
    assert " ".join(choose_nodes(nodes.split(), wanted, failed.split())) == chosen


def test_the_table_of_the_document_is_this_one() -> None:
    assert table() in DOCUMENT.read_text(), "python -m tests.cluster.drivers.test_decide writes it anew"


def test_what_was_seen_has_a_test() -> None:
    folder = Path(__file__).parents[1] / "launch"
    tests = "".join(path.read_text() for path in folder.glob("test_slurm_*.py"))
    assert {case.seen for case in CASES if f"def {case.seen}(" not in tests} == {""}


def table() -> str:
    """The cases, for docs/slurm.md."""
    rows = ["| an attempt that ended so | is followed by | tried on Slurm |", "| --- | --- | --- |"]
    for case in CASES:
        decision = decide(case.status, case.signal, case.slurm, case.progress, case.history)
        then = "replaced" if decision.action == "again" else "left out"
        left_out = f"; {', '.join(case.exclude)} {then}" if case.exclude else ""
        rows.append(f"| {case.what} | **{decision.action}**{left_out}: {decision.why} | {'yes' if case.seen else ''} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    begin, end = text.index("| an attempt that ended so"), text.index("\n\nWhat the scripts decide")
    DOCUMENT.write_text(text[:begin] + table() + text[end + 1 :])
