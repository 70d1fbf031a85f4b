"""launch/slurm/train.sbatch comes back if it should, and not for ever; a program that only ends is enough.

The decisions themselves have a table of cases: tests/cluster/drivers/test_decide.py. Here Slurm does what they say.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megaresume.shipped import launch_script
from tests.release import release

if TYPE_CHECKING:
    from tests.cluster.launch.conftest import Cluster

#: in the place of PYTHON: has every module, looks at its node, and else does what the test says.
PROGRAM = f"""#!{sys.executable}
import os, sys, time
from pathlib import Path

node, attempt = os.environ["SLURMD_NODENAME"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
here = Path(__file__).parent


def say(kind, step):
    from megaresume.checkpoint.records.ledger import LedgerEntry, append_ledger, with_attempt
    from megaresume.checkpoint.records.names import ledger_path
    from megaresume.checkpoint.system import Topology

    words = dict(iteration=step, tag=None, samples=step, digest="0" * 16, run="a" * 16, time="", topology=Topology())
    root = Path(sys.argv[max(at for at, word in enumerate(sys.argv) if word == "--save") + 1])
    append_ledger(ledger_path(root), LedgerEntry(kind=kind, **words, details=with_attempt({{}})))


if sys.argv[1:3] == ["-m", "megaresume.cluster.drivers.node_check"]:
    # It imports torch, to see that it can; tests of real training have the real one.
    (here / "packages" / "torch").mkdir(parents=True, exist_ok=True)
    (here / "packages" / "torch" / "__init__.py").touch()
    os.environ["PYTHONPATH"] = f"{{here / 'packages'}}:{{os.environ.get('PYTHONPATH', '')}}"
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
#: in front of Slurm's own: a controller that is being restarted, when it is asked the first time.
SCONTROL = """#!/bin/bash
if [[ $1 == requeue && ! -e $AWAY ]]; then
  touch "$AWAY"
  echo "scontrol: error: Unable to contact slurm controller (connect failure)" >&2
  exit 1
fi
exec PATH_OF_SCONTROL "$@"
"""
RUN_DIR = "a run, 'mine'"


def submit(slurm: Cluster, directory: Path, play: str, *options: str, script: Path | None = None, **env: str) -> str:
    (directory / "python").write_text(PROGRAM + play)
    (directory / "python").chmod(0o755)
    (directory / "data.yaml").touch()
    settings = {"PYTHON": str(directory / "python"), "DRIVER": sys.executable, "PROCS_PER_NODE": "1"}
    # A name that has to be quoted everywhere.
    settings |= {"LAUNCHER": "srun", "NODE_CHECK": "no", "RUN_DIR": str(directory / RUN_DIR)} | env
    words = ["sbatch", "--parsable", "--nodes=1", "--time=10", *options]
    words += [str(script or launch_script("slurm/train.sbatch")), "--note", "two words"]
    done = subprocess.run(words, cwd=directory, env=slurm.env | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def said(directory: Path, words: str, *, run: str = RUN_DIR, seconds: float = 240) -> list[str]:
    """All decisions, once one of them has these words."""
    log = directory / run / "logs" / "batch.log"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lines = log.read_text().splitlines() if log.exists() else []
        if any(words in line for line in lines):
            return [line.split("] ", 1)[1] for line in lines]
        time.sleep(0.1)
    outputs = "\n".join(path.read_text() for path in [*directory.glob("*.log"), *directory.glob("*/logs/*/*")])
    pytest.fail(f"not within {seconds} s: {words}; {lines}\n{outputs}")


def test_a_chain_whose_length_stands_in_the_script_comes_to_an_end(slurm: Cluster, tmp_path: Path) -> None:
    text = launch_script("slurm/train.sbatch").read_text()
    # As a user edits it: every job of the chain has this line.
    for setting in ("CHAIN=${CHAIN:-0}", "REQUEUE=${REQUEUE:-yes}"):
        assert text.count(setting) == 1
    script = tmp_path / "train.sbatch"
    script.write_text(text.replace("CHAIN=${CHAIN:-0}", "CHAIN=1").replace("REQUEUE=${REQUEUE:-yes}", "REQUEUE=no"))
    submit(slurm, tmp_path, 'say("checkpoint", 1)', script=script)
    try:
        lines = said(tmp_path, "and no job follows")
        assert sum(line.startswith("start: ") for line in lines) == 2
    finally:
        slurm.slurm("scancel", "--name=megaresume")


def test_a_controller_that_is_away_when_the_job_is_to_be_queued_again(slurm: Cluster, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    real = subprocess.run(["bash", "-c", "command -v scontrol"], capture_output=True, text=True).stdout.strip()
    (tools / "scontrol").write_text(SCONTROL.replace("PATH_OF_SCONTROL", real))
    (tools / "scontrol").chmod(0o755)
    away = {"PATH": f"{tools}:{slurm.env['PATH']}", "AWAY": str(tmp_path / "away")}
    job = submit(slurm, tmp_path, "sys.exit(3)", **away)
    try:
        lines = said(tmp_path, "queued again")
        assert (tmp_path / "away").exists()
        again = [line for line in lines if "queued again" in line]
        assert len(again) == 1 and again[0].startswith("queued again: failed with status 3, attempt 1 in a row without")
    finally:
        slurm.slurm("scancel", job)


def test_a_bad_node_is_left_out_and_only_a_run_that_says_so_is_over(slurm: Cluster, tmp_path: Path) -> None:
    """Fails on n1, ends with 0 on another node without a word, and is over the third time."""
    play = """
if node == "n1":
    raise OSError("this node is broken")
say("finished" if attempt == 2 else "checkpoint", 7)
"""
    submit(slurm, tmp_path, play, EXCLUDE_NODES="1")
    lines = said(tmp_path, "the run is over")
    decisions = [line for line in lines if not line.startswith("start: ")]
    error = "rank 0 on n1 failed first: OSError: this node is broken"
    assert decisions == [
        error,
        "queued again: failed with status 1, attempt 1 in a row without a new checkpoint, MAX_RESTARTS=3",
        f"node n1 is left out from now on: {error}",
        f"node n1 is left out: {error}",
        "queued again: ended with status 0, and the run has not said that it is over, new checkpoint at step 7",
        f"node n1 is left out: {error}",
        "the run is over: it has said so after step 7; not queued again",
    ]


def test_a_signal_before_the_driver_listens(slurm: Cluster, tmp_path: Path) -> None:
    """The first import of a cold file system takes long; what comes in that time counts."""
    driver = tmp_path / "driver"
    wait = f"if [[ $1 == -c ]] && mkdir {tmp_path}/begun; then until [[ -e {tmp_path}/told ]]; do sleep 0.1; done; fi"
    driver.write_text(f'#!/bin/bash\n{wait} 2>/dev/null\nexec {sys.executable} "$@"\n')
    driver.chmod(0o755)
    play = """
while attempt == 0 and not Path(sys.argv[sys.argv.index("--megaresume-stop-file") + 1]).exists():
    time.sleep(0.1)
say("finished" if attempt else "checkpoint", 7)
"""
    job = submit(slurm, tmp_path, play, DRIVER=str(driver))
    while not (tmp_path / "begun").exists():
        time.sleep(0.1)
    slurm.slurm("scancel", "--batch", "--signal=USR1", job)
    (tmp_path / "told").touch()
    lines = said(tmp_path, "the run is over")
    assert lines[1:3] == [
        "USR1 came: all ranks save at the end of their step",
        "queued again: stopped by USR1, new checkpoint at step 7",
    ]


def test_one_task_of_an_array_fails_and_the_others_go_on(slurm: Cluster, tmp_path: Path) -> None:
    """The last task has the number of the whole array: what was done to that was done to all of them."""
    play = """
task = os.environ["SLURM_ARRAY_TASK_ID"]
if task == "1" and attempt == 0:
    sys.exit(1)
while task == "0" and not (here / "go").exists():
    time.sleep(0.1)
say("finished", 7)
"""
    text = launch_script("slurm/train.sbatch").read_text()
    script = tmp_path / "train.sbatch"
    assert text.count("RUN_DIR=${RUN_DIR:-") == 1
    script.write_text(text.replace("\nDATA=", "\nRUN_DIR=$RUN_DIR/$SLURM_ARRAY_TASK_ID\nDATA=", 1))
    submit(slurm, tmp_path, play, "--array=0-1", script=script)
    assert said(tmp_path, "the run is over", run=f"{RUN_DIR}/1")[-1].startswith("the run is over")
    (tmp_path / "go").touch()
    healthy = said(tmp_path, "the run is over", run=f"{RUN_DIR}/0")
    assert len(healthy) == 2 and healthy[0].startswith("start: restart count 0")


def test_a_node_that_lacks_the_data_is_left_out(slurm: Cluster, tmp_path: Path) -> None:
    if slurm.mode != "ns":
        pytest.skip("the nodes share this machine's mounts: cluster.sh was not started as root")
    data = tmp_path / "shared"
    data.mkdir()
    (data / "data.yaml").touch()
    slurm.exec("n2", "mount", "-t", "tmpfs", "none", str(data))
    try:
        submit(
            slurm,
            tmp_path,
            'say("finished", 7)',
            "--nodes=2",
            NODE_CHECK="yes",
            DATA=str(data / "data.yaml"),
        )
        lines = said(tmp_path, "the run is over")
    finally:
        slurm.exec("n2", "umount", str(data))
    why = f"has no {data}/data.yaml, which other nodes have"
    assert lines[1] == f"node n2 fails its check: {why}"
    assert lines[2].startswith(f"queued again: nodes failed their check: n2: {why}, attempt 1 in a row")
    assert lines[3] == f"node n2 is left out from now on: {why}"
    assert "n2" not in lines[4].split("rank(s)")[0] and lines[-1].startswith("the run is over")


def test_a_node_without_the_script_is_left_out(slurm: Cluster, tmp_path: Path) -> None:
    """By the node check; and without one, when Python has said that it cannot open it."""
    if slurm.mode != "ns":
        pytest.skip("the nodes share this machine's mounts: cluster.sh was not started as root")
    program = tmp_path / "program"
    program.mkdir()
    (program / "train.py").touch()
    text = launch_script("slurm/train.sbatch").read_text()
    script = tmp_path / "train.sbatch"
    train = f"\nTRAIN=({program}/train.py)\n"
    script.write_text(re.sub(r"\nTRAIN=\(.*?\n\)\n", lambda _: train, text, flags=re.DOTALL))
    play = """
if not Path(sys.argv[1]).exists():
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
if node != "n2" and attempt == 0:
    time.sleep(600)  # until the other task is seen to have failed
say("finished", 7)
"""
    slurm.exec("n2", "mount", "-t", "tmpfs", "none", str(program))
    try:
        for check in ("yes", "no"):
            run_dir = str(tmp_path / check)
            submit(slurm, tmp_path, play, "--nodes=2", script=script, NODE_CHECK=check, RUN_DIR=run_dir)
            lines = said(tmp_path, "the run is over", run=check)
            without = "attempt 1 in a row without a new checkpoint, MAX_RESTARTS=3"
            if check == "yes":
                why = f"has no {program}/train.py, which other nodes have"
                again = f"queued again: nodes failed their check: n2: {why}, {without}"
            else:
                assert re.fullmatch(r"rank 1 on n2 failed first: \S+: can't open file .*", lines[1])
                why = lines[1]
                again = f"queued again: failed with status 137 (2 of the rank that failed first), {without}"
            assert lines[2] == again
            assert lines[3] == f"node n2 is left out from now on: {why}"
            assert "n2" not in lines[4].split("rank(s)")[0] and lines[-1].startswith("the run is over")
    finally:
        slurm.exec("n2", "umount", str(program))


def test_a_preemption_before_the_first_step_does_not_count(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm says by USR1 that it will end the job, and why only when the job has ended itself already."""
    play = """
stop = Path(sys.argv[sys.argv.index("--megaresume-stop-file") + 1])
if attempt == 0:
    (here / "begun").touch()
    while not stop.exists():
        time.sleep(0.1)
else:
    say("finished", 7)
"""
    submit(slurm, tmp_path, play, MAX_RESTARTS="0")
    deadline = time.monotonic() + 240
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    words = ["sbatch", "-p", "urgent", "--nodes=4", "--exclusive", "-o", "/dev/null", "--wrap", "true"]
    slurm.slurm(*words)
    lines = said(tmp_path, "the run is over")
    assert lines[1:3] == [
        "USR1 came: all ranks save at the end of their step",
        "queued again: stopped by USR1 (preemption), no new checkpoint, which does not count",
    ]


def test_a_spare_node_takes_the_place_of_a_bad_one_in_the_same_job(slurm: Cluster, tmp_path: Path) -> None:
    """One fails its check, and then a rank of another one fails; the third attempt is the end."""
    if slurm.mode != "ns":
        pytest.skip("the nodes share this machine's mounts: cluster.sh was not started as root")
    data = tmp_path / "shared"
    data.mkdir()
    (data / "data.yaml").touch()
    slurm.exec("n1", "mount", "-t", "tmpfs", "none", str(data))
    play = """
if node == "n2":
    raise OSError("this node is broken")
if node == "n4":
    say("finished", 7)
"""
    try:
        settings = {"NODE_CHECK": "yes", "TRAIN_NODES": "2", "DATA": str(data / "data.yaml")}
        job = submit(slurm, tmp_path, play, "--nodes=4", "--no-kill", **settings)
        lines = said(tmp_path, "the run is over")
    finally:
        slurm.exec("n1", "umount", str(data))
    checked, failed = (
        f"has no {data}/data.yaml, which other nodes have",
        "on n2 failed first: OSError: this node is broken",
    )
    begin = [line.split(", 1 rank(s)")[0] for line in lines if line.startswith("start: ")]
    assert begin == [f"start: restart count 0; 2 node(s) {nodes} of n[1-4]" for nodes in ("n1,n2", "n2,n3", "n3,n4")]
    again = [line for line in lines if line.startswith("again in this job: ")]
    without = "in a row without a new checkpoint, MAX_RESTARTS=3"
    assert again == [
        f"again in this job: nodes failed their check: n1: {checked}, attempt 1 {without}",
        f"again in this job: failed with status 1, attempt 2 {without}",
    ]
    assert [line for line in lines if " replaced " in line] == [
        f"node n1 is replaced by a spare one: {checked}",
        f"node n2 is replaced by a spare one: rank 0 {failed}",
    ]
    assert len({re.search(r"meeting at \S+:(\d+);", line)[1] for line in lines if "meeting at" in line}) == 3  # type: ignore[index]
    assert not (tmp_path / RUN_DIR / "logs" / f"{job}.1").exists()
    assert (tmp_path / RUN_DIR / "logs" / f"{job}.0.2").is_dir()


@release(
    "two minutes of real attempts",
    "`tests/cluster/drivers/test_decide.py` (no end without progress loops), "
    "`::test_a_bad_node_is_left_out_and_only_a_run_that_says_so_is_over`",
)
def test_without_progress_it_comes_to_an_end_whatever_ends_it(slurm: Cluster, tmp_path: Path) -> None:
    """A time limit, and then status 0: neither was counted once."""
    play = "time.sleep(0 if attempt else 600)"
    # 28 is WINCH, which means nothing to a batch script.
    submit(slurm, tmp_path, play, "--time=1", "--signal=B:28@1", MAX_RESTARTS="1")
    lines = said(tmp_path, "NOT queued again")
    assert [line for line in lines if "queued again" in line] == [
        "queued again: ended by Slurm (time limit), attempt 1 in a row without a new checkpoint, MAX_RESTARTS=1",
        "NOT queued again: ended with status 0, and the run has not said that it is over, "
        "attempt 2 in a row without a new checkpoint, MAX_RESTARTS=1",
    ]


def test_the_count_must_be_on_the_disk_before_anything_starts(slurm: Cluster, tmp_path: Path) -> None:
    logs = tmp_path / RUN_DIR / "logs"
    logs.mkdir(parents=True)
    # As a directory without free inodes or quota: the one file cannot be put in its place.
    job = submit(slurm, tmp_path, 'Path(here / "started").touch()', "--hold")
    (logs / f"attempts.{job}.json").mkdir()
    (logs / f"attempts.{job}.json" / "x").touch()
    slurm.slurm("scontrol", "release", job)
    lines = said(tmp_path, "refused")
    assert "the count of attempts cannot be" in lines[0]
    assert not (tmp_path / "started").exists()


def test_a_script_that_srun_starts_says_a_refusal_once(slurm: Cluster, tmp_path: Path) -> None:
    """srun ends no task because another one has failed, unless it is told to."""
    (tmp_path / "train.py").write_text("from megaresume import attach\nattach(object())\n")
    words = ["srun", "--nodes=1", "--ntasks=3", "--overcommit", sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(words, cwd=tmp_path, env=slurm.env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert re.findall("megaresume: error: (.*)", done.stderr) == ["megaresume.attach does not recognise this trainer"]
    assert "Traceback" not in done.stderr
