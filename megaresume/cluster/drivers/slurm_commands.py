"""Calls Slurm's commands and parses their output, for drivers of jobs and for `megaresume smoke`.

run       once, with any result
try_to    retried for a while if the controller does not answer: it may be busy or restarting
ask       like try_to, and must succeed
find_job  scontrol show job -o 17  ->  JobInfo(state="RUNNING", restarts=1, node_list="n[1-2]", ...)
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaresume.stream.errors import SetupError

COMMANDS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
#: seconds for which a controller may be away.
PATIENCE = 120.0
#: exit status for a command that did not answer in time.
NO_ANSWER = 124
#: final states of a job. PENDING, RUNNING, COMPLETING, REQUEUED ... are not among them.
FINAL = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)
_AWAY = ("Unable to contact slurm controller", "Socket timed out", "Connection refused", "Zero Bytes were transmitted")
#: States of a node that jobs can be given, now or when others have ended.
_USABLE = ("idle", "mixed", "allocated", "completing")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobInfo:
    """The controller's record of a job."""

    state: str
    #: why it is pending.
    reason: str
    #: how often the job was requeued.
    restarts: int
    #: the nodes that the job runs on, or last ran on, in Slurm's notation.
    node_list: str
    #: the node of the batch script.
    batch_host: str
    num_nodes: int
    num_tasks: int
    cpus_per_task: int
    #: minutes; None: no limit.
    time_limit: int | None
    #: seconds for which it has run.
    run_time: float
    #: the exit status of the batch script; 128 plus the signal that ended it.
    exit_status: int

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes by name; () while the job waits for its first. Calls Slurm, so only when needed."""
        return hostnames(self.node_list)

    @property
    def over(self) -> bool:
        """Whether it will never run again."""
        return self.state in FINAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition of the cluster."""

    name: str
    default: bool
    #: whether jobs are started in it.
    up: bool
    priority: int
    #: whether jobs of a higher priority may take its nodes.
    preemptable: bool
    #: most nodes for one job; None: all.
    max_nodes: int | None


def ignore_signals() -> None:
    """Ignore signals in a command, so that a signal to all of a job's processes does not lose the answer."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def run(*words: str, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command once, with any exit status; `NO_ANSWER` if it takes too long or cannot be run."""
    try:
        return subprocess.run(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            preexec_fn=ignore_signals,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, NO_ANSWER, stdout="", stderr=f"{error}")


def is_away(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a command failed because the controller is away."""
    return any(words in done.stderr for words in _AWAY)


def try_to(
    *words: str, env: Mapping[str, str] | None = None, timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """Run a command, with any exit status; retried while the controller is away.

    Raises:
        SetupError: no Slurm here, or no answer.
    """
    if shutil.which(words[0]) is None:
        raise SetupError(
            "there is no Slurm on this machine",
            found=f"no {words[0]} in PATH={os.environ.get('PATH', '')}",
            expected=", ".join(COMMANDS),
            cause="this is not a login node, or its Slurm is not on the path (often: module load slurm)",
            action="run it on a login node; or --launcher local; or a cluster on this machine: docs/slurm.md",
        )
    deadline = time.monotonic() + timeout
    while True:
        done = run(*words, env=env, timeout=max(1.0, deadline - time.monotonic()))
        if done.returncode == NO_ANSWER:
            raise SetupError(
                f"Slurm does not answer within {timeout:.0f} seconds", found=" ".join(words), action="scontrol ping"
            )
        if done.returncode == 0 or time.monotonic() > deadline or not is_away(done):
            return done
        time.sleep(1.0)


def ask(*words: str, env: Mapping[str, str] | None = None, failing: str | None = None) -> str:
    """Run a command that must succeed; returns its output.

    Args:
        failing: headline of the error.

    Raises:
        SetupError: it failed; quotes Slurm.
    """
    done = try_to(*words, env=env)
    if done.returncode:
        raise SetupError(
            failing or f"{words[0]} fails",
            found=(done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"),
            expected=f"exit status 0 of: {' '.join(words)}",
            action="run it by hand; if it fails there too, ask whoever runs the cluster",
        )
    return done.stdout


def find_job(job: str) -> JobInfo | None:
    """A job; None if Slurm has forgotten it, as it does minutes after the end.

    Raises:
        SetupError: see `ask`.
    """
    done = try_to("scontrol", "show", "job", "--oneliner", job)
    if done.returncode and "Invalid job id" in done.stderr:
        return None
    if done.returncode:
        raise SetupError(
            f"Slurm does not tell about job {job}", found=done.stderr.strip(), action=f"scontrol show job {job}"
        )
    fields = fields_of(done.stdout)
    code, _, sent = fields.get("ExitCode", "0:0").partition(":")
    return JobInfo(
        state=fields["JobState"],
        reason=fields.get("Reason", "None"),
        restarts=int(fields.get("Restarts", 0)),
        node_list=fields.get("NodeList", ""),
        batch_host=fields.get("BatchHost", ""),
        num_nodes=_number(fields["NumNodes"]),
        num_tasks=_number(fields.get("NumTasks", "")),
        cpus_per_task=_number(fields.get("CPUs/Task", "")),
        time_limit=_minutes(fields.get("TimeLimit", "UNLIMITED")),
        run_time=_seconds(fields.get("RunTime", "00:00:00")),
        exit_status=int(code) or (128 + int(sent) if int(sent or 0) else 0),
    )


def find_partitions() -> list[Partition]:
    """All partitions.

    Raises:
        SetupError: see `ask`.
    """
    config = _config()
    can_preempt = config.get("PreemptType", "preempt/none") == "preempt/partition_prio"
    found = []
    for line in ask("scontrol", "show", "partition", "--oneliner").splitlines():
        fields = fields_of(line)
        mode = fields.get("PreemptMode", config.get("PreemptMode", "OFF"))
        limit = fields.get("MaxNodes", "UNLIMITED")
        found.append(
            Partition(
                name=fields["PartitionName"],
                default=fields.get("Default") == "YES",
                up=fields.get("State") == "UP",
                priority=int(fields.get("PriorityTier", 1)),
                preemptable=can_preempt and mode != "OFF",
                max_nodes=int(limit) if limit.isdigit() else None,
            )
        )
    return found


def nodes_of(partition: str) -> dict[str, str]:
    """The nodes of a partition: name -> state, in the notation of ``sinfo``.

    Raises:
        SetupError: see `ask`.
    """
    lines = ask("sinfo", "--noheader", "--Node", "--partition", partition, "--format", "%N|%T").splitlines()
    return dict(line.split("|") for line in lines if "|" in line)


def usable(state: str) -> bool:
    """Whether a job can get a node in this state: also one planned for another job (``-``), or powered down (``~``) or
    up (``#``) to save energy; but not one that does not respond (``*``).
    """
    return state.rstrip("-~#") in _USABLE


def hostnames(nodes: str) -> tuple[str, ...]:
    """The names in ``n[1-3]``."""
    if nodes in ("", "(null)", "None"):
        return ()
    if "[" not in nodes:
        return tuple(nodes.split(","))
    return tuple(ask("scontrol", "show", "hostnames", nodes).split())


def version() -> str:
    """The version of the controller."""
    return _config().get("SLURM_VERSION", "unknown")


def kill_wait() -> int:
    """Seconds between SIGTERM and SIGKILL when Slurm ends a job."""
    return _number(_config().get("KillWait", "30 sec"))


def script_options(script: Path) -> list[str]:
    """The words of the ``#SBATCH`` lines of a script."""
    import shlex

    words: list[str] = []
    for line in script.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("#SBATCH"):
            words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
        elif line.strip() and not line.startswith("#"):
            break
    return words


def option(words: Sequence[str], long: str, short: str = "") -> str | None:
    """The value of an option of sbatch, from its last mention; None if it is missing."""
    value = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, inline = word.partition("=")
        if name == f"--{long}":
            value = inline if equals else following
        elif short and word.startswith(f"-{short}") and not word.startswith("--"):
            value = word[2:] or following
    return value


def _config() -> dict[str, str]:
    lines = ask("scontrol", "show", "config", failing="no Slurm controller answers").splitlines()
    return {name.strip(): value.strip() for name, equals, value in (line.partition("=") for line in lines) if equals}


def fields_of(line: str) -> dict[str, str]:
    """``A=1 B=x`` as a dictionary."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", line))


def _number(text: str) -> int:
    """The first number in ``2-4``; 1 if there is none, as for a cancelled job."""
    digits = re.match(r"\d+", text)
    return int(digits.group()) if digits else 1


def _seconds(text: str) -> float:
    """The seconds of a time such as ``1-02:03:04``."""
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")] if clock.replace(":", "").isdigit() else [0]
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + part
    return float(seconds + 86400 * int(days or 0))


def _minutes(text: str) -> int | None:
    return math.ceil(_seconds(text) / 60) if text[:1].isdigit() else None
