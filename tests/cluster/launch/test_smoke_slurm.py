"""`megaresume smoke --launcher slurm` on a real Slurm, with the batch scripts that are shipped.

Each test is one run with several stops: what takes time is the start of the training, on two cores. There are many more
steps than stops: a busy machine needs seconds to stop a job, and a run that is over before proves nothing.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megaresume.cluster.drivers.slurm_commands import find_job
from megaresume.cluster.launcher import Kind, Launch
from megaresume.cluster.smoke import slurm
from megaresume.cluster.smoke.slurm import SlurmLauncher
from megaresume.cluster.smoke.slurm_job import SlurmAttempt
from megaresume.stream.errors import SetupError, UsageError
from tests.cluster.smoke.conftest import costs_steps
from tests.release import release

if TYPE_CHECKING:
    from tests.cluster.launch.conftest import Cluster


# ---------------------------------------------------------------- the whole command


def smoke(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megaresume", "smoke", "--launcher", "slurm", "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=1700)


def proved(record: Callable[[str, object], None], out: Path, *words: str) -> dict[str, Any]:
    """The result of a test that holds; what it printed goes into the log of the tests."""
    done = smoke(out, *words)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    record("log", done.stdout)
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    assert result["holds"] and result["verified"]
    assert result["comparison"]["compared"] == result["steps"]
    assert re.fullmatch(r"Slurm \S+, partition batch: 4 nodes, \d asked", result["where"])
    return result


def layouts(result: dict[str, Any]) -> list[int]:
    return [attempt["layout"]["nodes"] for attempt in result["attempts"]]


def batch_log(out: Path) -> str:
    """The decisions of the batch scripts of the run; one file, as all attempts are one job."""
    (log,) = (out / "run" / "logs").glob("slurm-*.log")
    return log.read_text()


def through_every_stop(record: Callable[[str, object], None], out: Path, *words: str) -> None:
    # The wall time comes first: Slurm looks at it twice a minute, and the run goes on until then.
    kinds = "walltime,requeue,node-down,preempt,sigkill,sigterm"
    sizes = ["--nodes", "2,1,2,3,2,1", "--steps", "80", "--micro-batch-size", "1", "--workers", "0"]
    result = proved(record, out, "--kill", kinds, *sizes, *words)
    assert [stop["kind"] for stop in result["stops"]] == kinds.split(",")
    assert layouts(result) == [2, 1, 2, 3, 2, 1, 2]
    lost = {stop["kind"]: stop["lost"] for stop in result["stops"]}
    assert lost["walltime"] == lost["preempt"] == lost["sigterm"] == 0
    assert costs_steps(result, "sigkill")


@release(
    "eight launches, and a wall time of a minute",
    "`::test_a_killed_rank_with_zero_1`, "
    "`tests/cluster/launch/test_slurm_scripts.py::test_a_signal_a_requeue_a_cancel_and_the_end`",
)
@pytest.mark.timeout(1800)
def test_torchrun_through_every_stop(
    slurm: Cluster, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    through_every_stop(record_property, tmp_path / "out")
    # Slurm and the script bring the job back, nobody submits it again.
    log = batch_log(tmp_path / "out")
    assert [f"restart count {k};" in log for k in range(8)] == [True] * 7 + [False]
    assert "USR1 came" in log and "DUE TO NODE FAILURE" in log and "DUE TO JOB REQUEUE" in log
    assert "NOT queued again" not in log and "was cancelled" not in log
    nodes = re.findall(r"restart count \d+; \d node\(s\) (\S+),", log)
    assert [*nodes[:4]] == ["n[1-2]", "n1", "n[1-2]", "n[1,3-4]"]
    # what was done to the cluster is undone
    assert slurm.slurm("sinfo", "-hNp", "batch", "-o", "%T").split() == ["idle"] * 4
    assert slurm.slurm("squeue", "-h") == ""


@release(
    "eight launches each",
    "`::test_a_killed_rank_with_zero_1`, "
    "`tests/cluster/launch/test_slurm_scripts.py::test_a_signal_a_requeue_a_cancel_and_the_end`",
)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "words",
    ["--launch deepspeed --zero-stage 1", "--launch deepspeed --zero-stage 3", "--model vlm --zero-stage 1"],
)
def test_the_others_through_every_stop(
    slurm: Cluster, tmp_path: Path, record_property: Callable[[str, object], None], words: str
) -> None:
    through_every_stop(record_property, tmp_path / "out", *words.split())


RELEASE = release(
    "`[deepspeed]`: two launchers more on every node, each of which imports DeepSpeed",
    "the same, `[torchrun]`, `tests/cluster/drivers/test_slurm_settings.py::test_the_command_of_a_launcher`, and "
    "that command without Slurm: `tests/cluster/launch/test_scripts.py::test_one_run_through_all_scripts_and_signals`",
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=RELEASE)])
def test_a_killed_rank_with_zero_1(
    slurm: Cluster, tmp_path: Path, record_property: Callable[[str, object], None], launcher: str
) -> None:
    words = ["--launch", launcher, "--zero-stage", "1", "--kill", "sigkill", "--nodes", "2,1"]
    short = ["--steps", "20", "--min-step-seconds", "0.5", "--save-interval", "4", "--micro-batch-size", "1"]
    result = proved(record_property, tmp_path / "out", *words, *short, "--workers", "0")
    assert layouts(result) == [2, 1]
    assert costs_steps(result, "sigkill")


@release(
    "four launches",
    "`::test_a_killed_rank_with_zero_1`, "
    "`tests/cluster/training/test_vlm.py::test_killed_and_resumed_on_another_topology`",
)
@pytest.mark.timeout(1800)
def test_images_and_text(slurm: Cluster, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    words = ["--model", "vlm", "--zero-stage", "1", "--kill", "node-down,sigterm", "--nodes", "2,3,1"]
    short = ["--steps", "32", "--save-interval", "2", "--micro-batch-size", "1", "--workers", "0"]
    result = proved(record_property, tmp_path / "out", *words, *short)
    assert layouts(result) == [2, 3, 1] and result["stops"][1]["lost"] == 0


# ---------------------------------------------------------------- bad input, refused before anything runs


def refused(out: Path, *words: str, status: int = 2) -> str:
    done = smoke(out, *words)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert not (out / "reference").exists()
    return done.stderr


def test_a_partition_that_does_not_exist(slurm: Cluster, tmp_path: Path) -> None:
    error = refused(tmp_path / "out", "--partition", "gpus")
    assert "there is no partition gpus" in error and "batch (default), urgent" in error


def test_more_nodes_than_there_are(slurm: Cluster, tmp_path: Path) -> None:
    slurm.slurm("scontrol", "update", "nodename=n3", "state=down", "reason=test")
    error = refused(tmp_path / "out", "--nodes", "4,1")
    assert "3 of 4 nodes can be used (not: n3 down)" in error and "--nodes 3" in error


def test_a_job_array(slurm: Cluster, tmp_path: Path) -> None:
    error = refused(tmp_path / "out", "--sbatch-options=--array=0-3")
    assert "--array=0-3" in error and "same run directory" in error


def test_no_slurm_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="there is no Slurm on this machine"):
        SlurmLauncher().check([launch(tmp_path, 1)], ["requeue"])


@pytest.fixture
def own_namespaces(slurm: Cluster) -> Cluster:
    """Nodes that differ from each other."""
    if slurm.mode != "ns":
        pytest.skip("the nodes share this machine's mounts: cluster.sh was not started as root")
    return slurm


def test_a_directory_that_a_node_does_not_share(own_namespaces: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    own_namespaces.exec("n2", "mount", "-t", "tmpfs", "none", str(out))
    try:
        error = refused(out, "--nodes", "4,1", status=1)
        assert f"not every node shares {out}" in error and "n2 does not see it, of n1, n2, n3, n4" in error
        assert list(out.iterdir()) == []
        own_namespaces.exec("n2", "umount", str(out))
        own_namespaces.exec("n3", "mount", "--bind", str(out), str(out))
        own_namespaces.exec("n3", "mount", "-o", "remount,bind,ro", str(out))
        assert "n3 cannot write to it" in refused(out, "--nodes", "4,1", status=1)
    finally:
        for node in ("n2", "n3"):
            own_namespaces.exec(node, "bash", "-c", f"umount {out} 2>/dev/null || true")


def test_clocks_that_differ(own_namespaces: Cluster, tmp_path: Path) -> None:
    # No namespace has a time of day of its own, so `date` is another program there.
    late = tmp_path / "date"
    shutil.copy("/usr/bin/date", tmp_path / "real")
    late.write_text(f'#!/bin/bash\nexec {tmp_path}/real -d "-90 seconds" "$@"\n')
    late.chmod(0o755)
    own_namespaces.exec("n3", "mount", "--bind", str(late), "/usr/bin/date")
    try:
        with pytest.raises(SetupError, match="clocks of nodes differ") as error:
            SlurmLauncher().check([launch(tmp_path, 4)], ["requeue"])
        assert str(error.value.found).startswith(("n3 is 90.", "n3 is 89.", "n3 is 91."))
        assert "behind" in str(error.value.found) and "--exclude=n3" in str(error.value.action)
    finally:
        own_namespaces.exec("n3", "umount", "/usr/bin/date")
    launcher = SlurmLauncher()
    launcher.check([launch(tmp_path, 4)], ["requeue", "node-down", "preempt"])
    assert launcher.description.endswith("partition batch: 4 nodes, 4 asked")


def test_node_down_without_permission(own_namespaces: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.may_set_nodes_down("n1")
    as_nobody = tmp_path / "scontrol"
    as_nobody.write_text(f'#!/bin/bash\nexec runuser -u nobody -- {shutil.which("scontrol")} "$@"\n')
    as_nobody.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SetupError, match="you may not set nodes down") as error:
        slurm.may_set_nodes_down("n1")
    assert "leave node-down out of --kill" in str(error.value.action)


def test_no_partition_preempts(slurm: Cluster) -> None:
    with pytest.raises(SetupError, match="no partition preempts urgent"):
        _ = SlurmLauncher(partition="urgent").urgent
    with pytest.raises(UsageError, match="jobs of partition batch do not preempt"):
        _ = SlurmLauncher(urgent_partition="batch").urgent
    assert SlurmLauncher().urgent.name == "urgent"


# ---------------------------------------------------------------- the launcher, with scripts that do not train

QUIET = "#!/bin/bash\n#SBATCH --requeue\nsrun --overlap sleep 600 & wait\n"


def launch(directory: Path, nodes: int) -> Launch:
    return Launch(nodes=nodes, ranks_per_node=1, flags=(), env=(), run_dir=directory / "out" / "run", name="run")


@pytest.fixture
def start(slurm: Cluster, tmp_path: Path) -> Iterator[Callable[..., SlurmAttempt]]:
    """Starts a script that is given as text."""
    started: list[SlurmAttempt] = []

    def start(text: str, nodes: int = 2, after: SlurmAttempt | None = None, **options: Any) -> SlurmAttempt:
        script = tmp_path / "job.sh"
        script.write_text(text)
        job = SlurmLauncher(script, **options).start(launch(tmp_path, nodes), after=after)
        assert isinstance(job, SlurmAttempt)
        started.append(job)
        return job

    yield start
    for job in started:
        job.close()


def said(job: SlurmAttempt, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in job.text():
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.1)


@pytest.mark.parametrize("kind", ["node-down", "preempt"])
def test_the_cluster_is_given_back_when_the_test_is_broken_off(
    slurm: Cluster, start: Callable[..., SlurmAttempt], kind: Kind
) -> None:
    job = start(QUIET, 4)
    job.stop(kind)
    job.close()
    assert slurm.slurm("squeue", "-h") == ""
    assert "down" not in slurm.slurm("sinfo", "-hNp", "batch", "-o", "%T")


def test_a_job_that_takes_no_notice(slurm: Cluster, start: Callable[..., SlurmAttempt]) -> None:
    job = start("#!/bin/bash\ntrap '' TERM\necho begun\nwhile :; do sleep 0.1; done\n", 1, grace=3.0)
    said(job, "begun")
    with pytest.raises(SetupError, match="the job continued after sigterm"):
        job.stop("sigterm")
    assert slurm.slurm("squeue", "-h") == ""


def test_a_job_that_nothing_can_be_killed_of(start: Callable[..., SlurmAttempt]) -> None:
    job = start(QUIET)
    with pytest.raises(SetupError, match="no rank of job") as error:
        job.stop("sigkill")
    assert error.value.found == f"no rank of job {job.id} on n2"
    job.close()
    with pytest.raises(SetupError, match="there was nothing to stop with requeue"):
        job.stop("requeue")


def test_a_node_with_other_peoples_jobs_is_left_alone(slurm: Cluster, start: Callable[..., SlurmAttempt]) -> None:
    job = start(QUIET)
    other = slurm.slurm("sbatch", "--parsable", "-w", "n2", "--wrap", "sleep 600", "-o", "/dev/null").strip()
    while "RUNNING" not in slurm.slurm("squeue", "-h", "-j", other, "-o", "%T"):
        time.sleep(0.1)
    with pytest.raises(SetupError, match="other jobs run on it") as error:
        job.stop("node-down")
    assert error.value.found == f"jobs {other}"
    assert "down" not in slurm.slurm("sinfo", "-hNp", "batch", "-o", "%T")


def test_a_job_that_will_never_start(slurm: Cluster, start: Callable[..., SlurmAttempt], tmp_path: Path) -> None:
    slurm.slurm("scontrol", "update", "PartitionName=urgent", "MaxNodes=1")
    try:
        with pytest.raises(UsageError, match="may not have so many nodes"):
            SlurmLauncher(partition="urgent").check([launch(tmp_path, 2)], ["requeue"])
        with pytest.raises(SetupError, match="is never started") as error:
            start(QUIET, 2, partition="urgent")
        assert "Reason=PartitionNodeLimit" in str(error.value.found)
        assert slurm.slurm("squeue", "-h") == ""
    finally:
        slurm.slurm("scontrol", "update", "PartitionName=urgent", "MaxNodes=UNLIMITED")


def test_a_job_that_fails_and_comes_back_by_itself_has_ended(
    start: Callable[..., SlurmAttempt], tmp_path: Path
) -> None:
    # Not before it was seen to run: else the attempt that is waited for is the next one.
    fails = f"until [ -e {tmp_path}/go ]; do sleep 0.1; done\necho failed\nscontrol requeue $SLURM_JOB_ID\nsleep 600\n"
    job = start(f"#!/bin/bash\n#SBATCH --requeue\n{fails}", 1)
    (tmp_path / "go").touch()
    assert job.wait(120) == 1
    assert not job.running() and "failed" in job.text()
    info = find_job(job.id)
    assert info is not None and info.state == "CANCELLED"


def test_exit_status_and_a_new_job_after_one_that_is_over(start: Callable[..., SlurmAttempt]) -> None:
    first = start("#!/bin/bash\n#SBATCH --no-requeue\ntrap 'exit 3' TERM\necho begun\nsleep 600 & wait\n", 1)
    said(first, "begun")
    first.stop("sigterm")
    assert first.wait(60) == 3
    second = start("#!/bin/bash\necho second $SLURM_JOB_NUM_NODES\n", 2, after=first)
    assert second.id != first.id and second.wait(120) == 0 and second.text() == "second 2\n"
