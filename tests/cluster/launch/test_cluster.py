"""launch/slurm/local-cluster: starts, stops, loses nodes, leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.launch.conftest import running_cluster
from tests.docs.pages import section
from tests.release import release

if TYPE_CHECKING:
    from tests.cluster.launch.conftest import Cluster

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[2] / "launch" / "slurm" / "local-cluster"
#: Holds a cluster of its own until it is killed.
HOLDER = """
import sys, time
sys.path.insert(0, {here!r})
from conftest import running_cluster
with running_cluster(**{settings!r}) as cluster:
    print(cluster.root, cluster.mode, flush=True)
    time.sleep(600)
"""


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, os.popen("ps -eo pid,ppid,stat,etimes,args").read()
        time.sleep(0.1)


def script(name: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / name), *words]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=300)


def processes_of(root: Path) -> list[str]:
    """Processes that carry the cluster in their environment, or have its logs open: other than this one's children."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"SLURM_CONF={root}/slurm.conf".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_the_scripts_are_clean(shellcheck: str) -> None:
    done = subprocess.run([shellcheck, *SCRIPTS.glob("*.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_install_says_what_it_needs() -> None:
    done = script("install.sh", "megaresume-no-such-package")
    assert done.returncode == 1
    assert "megaresume-no-such-package" in done.stderr and "next action: sudo apt-get" in done.stderr
    assert script("install.sh").returncode == 0


def test_the_document() -> None:
    text = section("slurm.md", "A Slurm cluster on one machine")
    commands = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    # The smoke test is tried elsewhere; a session in a user namespace, and what stands for the reader's own, is not.
    elsewhere = ("megaresume smoke", "/path/to", "cd /", "unshare", "&&", "squeue")
    tried = [line for line in commands if not any(words in line for words in elsewhere)]
    (stop,) = [line for line in tried if line.endswith(" stop")]
    tried = [*(line for line in tried if line != stop), stop]
    assert len(tried) == 15, tried
    with running_cluster() as cluster:
        env = cluster.env | {"CLUSTER_ROOT": str(cluster.root), "CLUSTER_ID": cluster.root.name}
        program = "set -eux -o pipefail\n" + "\n".join(tried)
        done = subprocess.run(
            ["bash", "-c", program], env=env, cwd=HERE.parents[2], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert script("cluster.sh", "status", CLUSTER_ROOT=str(cluster.root)).returncode == 1


def test_nodes_are_there(slurm: Cluster) -> None:
    names = sorted(slurm.slurm("srun", "-N4", "bash", "-c", "echo $SLURMD_NODENAME $(hostname)").split("\n")[:-1])
    hosts = slurm.nodes if slurm.mode == "ns" else [os.uname().nodename] * 4
    assert names == [f"{node} {host}" for node, host in zip(slurm.nodes, hosts, strict=True)]
    assert slurm.exec("n2", "bash", "-c", "echo $((6 * 7))") == "42\n"
    again = script("cluster.sh", "start", CLUSTER_ROOT=str(slurm.root))
    assert again.returncode == 0 and "already running: 4 nodes" in again.stderr
    assert "n5" in script("cluster.sh", "exec", "n5", "true", CLUSTER_ROOT=str(slurm.root)).stderr


def test_a_power_cut_requeues_the_job(slurm: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = slurm.slurm(
        "sbatch", "--parsable", "-N2", "-w", "n1,n3", "--requeue", "--open-mode=append", "-o", log,
        "--wrap", "echo $SLURM_RESTART_COUNT: $SLURM_JOB_NODELIST; srun sleep 600",
    ).strip()  # fmt: skip
    wait_for(lambda: log.exists() and log.read_text())
    wait_for(lambda: slurm.slurm("squeue", "-h", "-s", "-j", job, "-o", "%i").count(f"{job}.0"))
    slurm.kill_node("n3")
    slurm.slurm("scontrol", "update", "nodename=n3", "state=down", "reason=power")
    wait_for(lambda: "Restarts=1" in slurm.slurm("scontrol", "show", "job", job))
    # The job asks for n3 again, so it waits until that is back.
    assert "State=DOWN" in slurm.slurm("scontrol", "show", "node", "n3")
    slurm.start_node("n3")
    slurm.slurm("scontrol", "update", "nodename=n3", "state=resume")
    wait_for(lambda: "1: n[1,3]" in log.read_text())


RELEASE = release(
    "`[flat]`: another kind of cluster",
    "the same, `[auto]`",
)


@pytest.mark.parametrize("mode", ["auto", pytest.param("flat", marks=RELEASE)])
def test_nothing_is_left_when_its_pytest_is_killed(mode: str) -> None:
    program = HOLDER.format(here=str(HERE), settings={"CLUSTER_MODE": mode})
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        root, found = holder.stdout.readline().split()
        assert mode in ("auto", found)
        env = os.environ | {"SLURM_CONF": f"{root}/slurm.conf"}
        with subprocess.Popen(["srun", "-N2", "sleep", "600"], env=env, start_new_session=True) as job:
            try:
                wait_for(lambda: any("sleep 600" in line for line in processes_of(Path(root)) if "srun" not in line))
                holder.kill()
                wait_for(lambda: script("cluster.sh", "status", CLUSTER_ROOT=root).returncode == 1)
            finally:
                holder.kill()
                # With its child, which outlives it, and would look for a controller for minutes to end the job there.
                os.killpg(job.pid, signal.SIGKILL)
    wait_for(lambda: not processes_of(Path(root)))
    # The kernel takes the bridge away a moment after the last process.
    wait_for(lambda: not Path(f"/sys/class/net/mrslurm{Path(root).name}").exists())
