"""The settings of the batch script, and what is refused before anything starts.

SlurmSettings    as they were given: words
check            those that are known, that fit this job, and that lead to a Python and data
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megaresume.launching.driver import Settings
from megaresume.launching.slurm_job import SlurmJob
from megaresume.launching.tasks import LAUNCHERS
from megaresume.stream.errors import UsageError


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
    return ranks


def _ends_in(name: str, task: str) -> bool:
    """Whether a directory is that of one task of an array."""
    return name.endswith(task) and not name[: -len(task)][-1:].isdigit()
