"""The settings of the batch script, what is refused before anything starts, and the command on every node.

SlurmSettings    as they were given: words
check            those that are known, that fit this job, and that lead to a Python and data
tasks            what srun starts on every node, for each launcher:

    torchrun     one torchrun a node
    srun         one task a rank
    deepspeed    one deepspeed launcher a node, without ssh
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaresume.cluster.launching.driver import Settings
from megaresume.cluster.launching.slurm_job import SlurmJob
from megaresume.stream.errors import UsageError

LAUNCHERS = ("torchrun", "srun", "deepspeed")
#: USR1 reaches every process of a step, and TERM at the end of the job: launchers and containers would die of them.
#: Each task leaves a byte when it ignores them.
_IGNORE_SIGNALS = 'trap "" USR1 TERM; printf . >>"$0"; exec "$@"'


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmSettings(Settings):
    """Those of the batch script, which is here as Slurm has copied it."""

    launcher: str
    train_nodes: str
    requeue: str
    chain: str
    chain_options: str
    exclude_nodes: str
    node_check: str
    save_seconds: str
    srun_options: str
    #: the signal that came to the script before the driver listened; -: none.
    heard: str
    container: tuple[str, ...]

    @property
    def contained(self) -> bool:
        """Whether the training runs in a container."""
        return bool(self.container) or "--container-image" in self.srun_options

    @property
    def has_spares(self) -> bool:
        """Whether the job may have more nodes than train."""
        return self.train_nodes != "all"


def check(settings: SlurmSettings, job: SlurmJob, run_dir: Path) -> int:
    """Look at the settings; the ranks on a node.

    Raises:
        UsageError: one is wrong.
    """
    env = os.environ
    if int(env.get("SLURM_HET_SIZE", "1")) > 1:
        what = "this is a heterogeneous job, of which only the first part would train"
        raise UsageError(what, action="submit without ':'")
    task = env.get("SLURM_ARRAY_TASK_ID")
    if task is not None and not _ends_in(run_dir.name, task):
        raise UsageError(
            f"the jobs of this array would all write to RUN_DIR={run_dir}",
            action="submit without --array, or edit RUN_DIR so that it ends in /$SLURM_ARRAY_TASK_ID",
        )
    for name, value, known in (
        ("REQUEUE", settings.requeue, ("yes", "no")),
        ("NODE_CHECK", settings.node_check, ("yes", "no")),
        ("LAUNCHER", settings.launcher, LAUNCHERS),
    ):
        if value not in known:
            raise UsageError(f"{name}={value} is not known", action=" or ".join(f"{name}={word}" for word in known))
    settings.check_numbers(("CHAIN", "MAX_RESTARTS", "SAVE_SECONDS", "EXCLUDE_NODES"))
    if settings.has_spares and not (settings.train_nodes.isdecimal() and int(settings.train_nodes)):
        raise UsageError(f"TRAIN_NODES={settings.train_nodes} is not a number of nodes, or: all")
    ranks = settings.ranks_per_node(lambda: env.get("SLURM_GPUS_ON_NODE", "1") if job.asked_for_gpus() else "1")
    if not settings.contained:
        settings.check_python(f" on {env.get('SLURMD_NODENAME')}")
        if settings.node_check == "no":
            settings.check_data()
            settings.check_script()
    return ranks


def _ends_in(name: str, task: str) -> bool:
    """Whether a directory is that of one task of an array."""
    return name.endswith(task) and not name[: -len(task)][-1:].isdigit()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where the ranks are, and where they meet."""

    nodes: tuple[str, ...]
    ranks_per_node: int
    address: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """What srun is told."""

    per_node: int
    words: tuple[str, ...]
    #: has a byte of each task that may be sent signals.
    ignoring: Path
    env: dict[str, str] = field(default_factory=dict)


def tasks(
    launcher: str, layout: Layout, *, python: str, container: Sequence[str], training: Sequence[str], logs: Path
) -> Tasks:
    """The tasks of a launcher.

    Args:
        launcher: one of `LAUNCHERS`.
        layout: where the ranks are.
        python: that they run in.
        container: what goes before a command on every node; (): nothing.
        training: what follows ``python``: a script or ``-m`` and a module, and its flags.
        logs: a directory for files of this attempt that all nodes see.
    """
    train, python = shlex.join(training), shlex.quote(python)
    nodes, ranks, where = len(layout.nodes), layout.ranks_per_node, (layout.address, str(layout.port))
    per_node, env = 1, {}
    if launcher == "torchrun":
        task = (
            f'exec {python} -m torch.distributed.run --nnodes {nodes} --node-rank "$SLURM_NODEID" '
            f"--master-addr {where[0]} --master-port {where[1]} --nproc-per-node {ranks} {train}"
        )
        # Slurm sends TERM to everything when a job ends. torchrun would kill its ranks; left alone, they save.
        env["PET_SIGNALS_TO_HANDLE"] = "SIGINT"
    elif launcher == "srun":
        per_node = ranks
        # Each task sees all GPUs of its node and takes that of its number: no --gpus-per-task.
        task = (
            "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
            f"LOCAL_WORLD_SIZE={ranks}; exec {python} {train}"
        )
    else:
        # What DeepSpeed would else find out by ssh. It starts the ranks of its own node only.
        hosts = logs / "hostfile"
        hosts.write_text("".join(f"{node} slots={ranks}\n" for node in layout.nodes))
        # What follows -m is a module to Python, and what follows --module to DeepSpeed.
        if training[0] == "-m":
            train = shlex.join(["--module", *training[1:]])
        task = (
            f"exec {python} -m deepspeed.launcher.runner --hostfile {shlex.quote(str(hosts))} --no_ssh "
            f'--node_rank "$SLURM_NODEID" --master_addr {where[0]} --master_port {where[1]} {train}'
        )
    ignoring = logs / "ignoring"
    words = ("bash", "-c", _IGNORE_SIGNALS, str(ignoring), *container, "bash", "-c", task)
    return Tasks(per_node=per_node, words=words, env=env, ignoring=ignoring)
