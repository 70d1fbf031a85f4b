"""The settings of the batch script, and what is refused before anything starts.

Settings    as they were given: words
check       those that are known, that fit this job, and that lead to a Python and data
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megaresume.launching.slurm_job import SlurmJob
from megaresume.launching.tasks import LAUNCHERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Those of the batch script, which explains them; numbers as they were given."""

    run_dir: str
    data: str
    python: str
    launcher: str
    procs_per_node: str
    train_nodes: str
    requeue: str
    chain: str
    chain_options: str
    max_restarts: str
    exclude_nodes: str
    node_check: str
    save_seconds: str
    srun_options: str
    #: of the batch script, as Slurm has copied it.
    script: str
    #: the signal that came to it before the driver listened; -: none.
    heard: str
    container: tuple[str, ...]
    train: tuple[str, ...]
    #: given to the script.
    flags: tuple[str, ...]

    @property
    def contained(self) -> bool:
        """Whether the training runs in a container."""
        return bool(self.container) or "--container-image" in self.srun_options

    @property
    def has_spares(self) -> bool:
        """Whether the job may have more nodes than train."""
        return self.train_nodes != "all"


class Refused(Exception):
    """A setting is wrong: ``args`` are what, and what to do."""


def check(settings: Settings, job: SlurmJob, run_dir: Path) -> int:
    """Look at the settings; the ranks on a node.

    Raises:
        Refused: one is wrong.
    """
    env = os.environ
    if int(env.get("SLURM_HET_SIZE", "1")) > 1:
        raise Refused("this is a heterogeneous job, of which only the first part would train", "submit without ':'")
    task = env.get("SLURM_ARRAY_TASK_ID")
    if task is not None and not _ends_in(run_dir.name, task):
        raise Refused(
            f"the jobs of this array would all write to RUN_DIR={run_dir}",
            "submit without --array, or edit RUN_DIR so that it ends in /$SLURM_ARRAY_TASK_ID",
        )
    for name, value, known in (
        ("REQUEUE", settings.requeue, ("yes", "no")),
        ("NODE_CHECK", settings.node_check, ("yes", "no")),
        ("LAUNCHER", settings.launcher, LAUNCHERS),
    ):
        if value not in known:
            raise Refused(f"{name}={value} is not known", " or ".join(f"{name}={word}" for word in known))
    for name in ("CHAIN", "MAX_RESTARTS", "SAVE_SECONDS", "EXCLUDE_NODES"):
        if not (value := getattr(settings, name.lower())).isdecimal():
            raise Refused(f"{name}={value} is not a number")
    if settings.has_spares and not (settings.train_nodes.isdecimal() and int(settings.train_nodes)):
        raise Refused(f"TRAIN_NODES={settings.train_nodes} is not a number of nodes, or: all")
    ranks = _ranks_per_node(settings, job)
    if not settings.contained:
        if shutil.which(settings.python) is None:
            raise Refused(
                f"there is no PYTHON={settings.python} on {env.get('SLURMD_NODENAME')}",
                "set PYTHON to the one of your environment, the whole path",
            )
        if settings.node_check == "no" and not Path(settings.data).is_file():
            raise Refused(f"there is no DATA={settings.data}", "set DATA to your data.yaml, with its whole path")
    return ranks


def _ranks_per_node(settings: Settings, job: SlurmJob) -> int:
    words = settings.procs_per_node
    if words == "auto":
        words = os.environ.get("SLURM_GPUS_ON_NODE", "1") if job.asked_for_gpus() else "1"
    if not words.isdecimal() or int(words) < 1:
        raise Refused(f"PROCS_PER_NODE={words} is not a number of ranks")
    return int(words)


def _ends_in(name: str, task: str) -> bool:
    """Whether a directory is that of one task of an array."""
    return name.endswith(task) and not name[: -len(task)][-1:].isdigit()
