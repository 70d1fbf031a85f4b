"""The ways in which a job of Slurm is stopped, each with the real thing: Slurm's own timer, its own preemption.

sigkill     srun --overlap on the last node: SIGKILL for one rank
sigterm     scancel --batch --signal=TERM
requeue     scontrol requeue
node-down   scontrol update state=down, of a node without the batch script where there is one
walltime    scontrol update TimeLimit: to the minute after the next, so the timer sends what --signal asks for, or kills
preempt     a job of the urgent partition on the same nodes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaresume.cluster.launching.slurm_commands import JobInfo, ask, try_to
from megaresume.cluster.smoke.job import Kind
from megaresume.stream.errors import SetupError

if TYPE_CHECKING:
    from megaresume.cluster.smoke.slurm_job import SlurmJob

# On the node, kills the last rank: processes of this job and node that were told a RANK, and whose parent was not, as
# workers of a rank were. All nodes of a test cluster may share one process table, so the node's name is looked at.
_KILL_A_RANK = """
cd /proc || exit
ranks=$(grep -lszx "SLURM_JOB_ID=$1" [0-9]*/environ | xargs -r grep -lszx "SLURMD_NODENAME=$SLURMD_NODENAME" |
  xargs -r grep -lsz '^RANK=[0-9]' | cut -d / -f 1 | sort -n)
for pid in $ranks; do
  parent=$(sed -n 's/^PPid:[[:space:]]*//p' "$pid/status" 2>/dev/null)
  case " $(echo $ranks) " in *" $parent "*) ;; *) last=$pid ;; esac
done
if [ -n "$last" ]; then kill -KILL "$last" && echo "killed $last"; fi
"""


@dataclass(slots=True)
class Lost:
    """What was done to the cluster, and is to be undone; empty: nothing."""

    node: str = ""
    urgent_job: str = ""


def undo(lost: Lost) -> None:
    """Give back what a stop has taken.

    Raises:
        SetupError: Slurm refuses.
    """
    if lost.urgent_job:
        try_to("scancel", lost.urgent_job)
        lost.urgent_job = ""
    if lost.node:
        node, lost.node = lost.node, ""
        ask("scontrol", "update", f"nodename={node}", "state=resume", failing=f"node {node} cannot be resumed")


def _sigkill(job: SlurmJob, info: JobInfo) -> None:
    # Of the last node: the first one hosts the place where the ranks meet, and would be missed at once.
    node = info.nodes[-1]
    words = ["srun", "--overlap", "--quiet", f"--jobid={job.id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
    done = try_to(*words, "--chdir=/", "bash", "-c", _KILL_A_RANK, "kill-a-rank", job.id)
    if "killed" not in done.stdout:
        raise SetupError(
            "there was nothing to stop with sigkill",
            found=f"no rank of job {job.id} on {node}" + (f": {done.stderr.strip()}" if done.stderr.strip() else ""),
            expected="processes with RANK in their environment, as torchrun, deepspeed and launch/slurm start them",
            action="leave sigkill out of --kill, or export RANK before the training is started",
        )


def _sigterm(job: SlurmJob, info: JobInfo) -> None:
    ask("scancel", "--batch", "--signal=TERM", job.id)


def _requeue(job: SlurmJob, info: JobInfo) -> None:
    ask("scontrol", "requeue", job.id, failing="the job cannot be queued again")


def _node_down(job: SlurmJob, info: JobInfo) -> None:
    nodes = info.nodes
    node = next((name for name in reversed(nodes) if name != info.batch_host), nodes[0])
    others = [
        other for other in ask("squeue", "--noheader", f"--nodelist={node}", "--format=%A").split() if other != job.id
    ]
    if others:
        raise SetupError(
            f"node {node} is not set down: other jobs run on it",
            found=f"jobs {', '.join(others)}",
            expected="a node that this job has for itself",
            action="--sbatch-options --exclusive, or leave node-down out of --kill",
        )
    job.lost.node = node
    ask("scontrol", "update", f"nodename={node}", "state=down", "reason=megaresume-smoke")


def _walltime(job: SlurmJob, info: JobInfo) -> None:
    # A minute at least: Slurm looks at limits twice a minute, and one that is over ends the job without its signal.
    minutes = int(info.run_time // 60) + 2
    ask("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}", failing="its time limit cannot be changed")


def _preempt(job: SlurmJob, info: JobInfo) -> None:
    nodes = info.nodes
    words = ["sbatch", "--parsable", "--job-name=megaresume-smoke-urgent", f"--partition={job.urgent.name}"]
    words += [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--exclusive", "--no-requeue"]
    # Its only purpose is to have the nodes until the preempted job has left them.
    words += ["--time=60", "--output=/dev/null", "--wrap=sleep 3600"]
    job.lost.urgent_job = ask(*words, failing="the job that is to preempt is refused").strip().split(";")[0]


STOPS: dict[Kind, Callable[[SlurmJob, JobInfo], None]] = {
    "sigkill": _sigkill,
    "sigterm": _sigterm,
    "requeue": _requeue,
    "node-down": _node_down,
    "walltime": _walltime,
    "preempt": _preempt,
}
