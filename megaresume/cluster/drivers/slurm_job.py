"""This job, through Slurm's commands. Array tasks are always named ARRAY_TASK: for the last task of an array,
SLURM_JOB_ID is the number of the whole array, and a command with it would affect all tasks.

    show job, show node, show config       what Slurm knows, including the nodes that the job still has
    requeue, cancel, submit, leave out     actions

Also the settings of its script, the checks before anything starts, and the command for every node:

    SlurmSettings    as given: words
    check            refuses those that are unknown, do not fit this job, or lack a Python or data
    Chain            the jobs that follow this one
    tasks            what srun starts on every node, for each launcher:

        torchrun     one torchrun per node
        srun         one task per rank
        deepspeed    one deepspeed launcher per node, without ssh
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from megaresume.cluster.drivers.decide import Reason
from megaresume.cluster.drivers.driver import LaunchSettings, modules_of, script_of
from megaresume.cluster.drivers.node_check import Verdict
from megaresume.cluster.drivers.slurm_commands import NO_ANSWER, fields_of, ignore_signals, is_away, run, usable
from megaresume.stream.errors import UsageError

#: How often, and after how many seconds, a requeue is retried if the controller is away.
_TRIES, _PAUSE = 30, 5.0
#: Reasons for the end of an attempt, by Slurm's words in the batch log.
_REASONS: dict[str, Reason] = {
    "TIME LIMIT": "time limit",
    "PREEMPTION": "preemption",
    "NODE FAILURE": "node failure",
    "JOB REQUEUE": "requeue",
}
#: options of sbatch that the next job of a chain inherits, with Slurm's variables for them.
_OPTIONS = {
    "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT",
    "qos": "SLURM_JOB_QOS",
    "reservation": "SLURM_JOB_RESERVATION",
    "gpus-per-node": "SLURM_GPUS_PER_NODE",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
    "mem": "SLURM_MEM_PER_NODE",
}


#: $1: the job, $2: the command that ends it, $3: a log.
_WATCH = r"""trap '' USR1
while sleep 20; do
  job=$(scontrol show job --oneliner "$1") || continue
  [[ $job =~ \ NodeList=([^ ]+) ]] && left=$(scontrol show hostnames "${BASH_REMATCH[1]}") || continue
  [[ $job =~ \ BatchHost=([^ ]+) ]] && host=${BASH_REMATCH[1]} && ! grep -qx -- "$host" <<<"$left" || continue
  $2 "$1" && echo "$(date +%FT%T) [job $1, on $SLURMD_NODENAME] Slurm has lost $host, where the script was: $2" >>"$3"
done"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    """The Slurm job of this process."""

    #: the id for Slurm's commands: ``17``, or ``12_3`` in an array.
    id: str
    #: how often the job was requeued.
    attempt: int
    name: str
    nodes: tuple[str, ...]
    node_list: str
    partition: str

    @classmethod
    def of_environment(cls) -> SlurmJob:
        """The job in the environment variables of a batch script."""
        env = os.environ
        array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
        node_list = env["SLURM_JOB_NODELIST"]
        return cls(
            id=f"{array}_{task}" if array and task else env["SLURM_JOB_ID"],
            attempt=int(env.get("SLURM_RESTART_COUNT", "0")),
            name=env.get("SLURM_JOB_NAME", "megaresume"),
            nodes=tuple(run("scontrol", "show", "hostnames", node_list).stdout.split()),
            node_list=node_list,
            partition=env.get("SLURM_JOB_PARTITION", ""),
        )

    def show(self, job: str = "") -> dict[str, str]:
        """The controller's record of it, or of another job; {} without an answer."""
        return fields_of(run("scontrol", "show", "job", "--oneliner", job or self.id).stdout)

    def state(self) -> str:
        """The state, such as RUNNING; "" if unknown."""
        return run("squeue", "-h", "-j", self.id, "-o", "%T").stdout.strip()

    def is_preempted(self) -> bool:
        """Whether Slurm has decided to give its nodes to another job, which the job's own signal announces."""
        return self.show().get("PreemptTime", "None")[:1].isdigit()

    def end_time(self) -> int | None:
        """The time limit, in seconds since 1970."""
        end = self.show().get("EndTime", "")
        return int(datetime.fromisoformat(end).timestamp()) if end[:1].isdigit() else None

    def asked_for_gpus(self) -> bool:
        """Whether GPUs were requested; ``--exclusive`` alone gives a job all GPUs of a node."""
        return any("gpu" in value for name, value in self.show().items() if name.startswith("TresPer"))

    def address_of(self, node: str) -> str:
        """The address at which Slurm reaches a node: other nodes may not know its name."""
        return fields_of(run("scontrol", "show", "node", "--oneliner", node).stdout).get("NodeAddr", node)

    def nodes_left(self) -> tuple[str, ...]:
        """The nodes that it still has: with ``--no-kill``, Slurm removes those that fail."""
        left = run("scontrol", "show", "hostnames", self.show().get("NodeList", "")).stdout.split()
        return tuple(node for node in self.nodes if node in left) or self.nodes

    def watch(self, nodes: Sequence[str], log: Path, *, requeue: bool) -> subprocess.Popen[bytes]:
        """Make other nodes end this job if the node of its batch script dies.

        With ``--no-kill``, Slurm would keep the job until its time limit, without a script.

        Args:
            nodes: the other ones, which need hardly any time for it.
            log: for decisions.
            requeue: requeue it; otherwise it is cancelled, and a chain continues.
        """
        count, end = len(nodes), "scontrol requeue" if requeue else "scancel"
        words = ["srun", "--overlap", "--no-kill", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        words += [f"--nodelist={','.join(nodes)}", "bash", "-c", _WATCH, "watch", self.id, end, str(log)]
        nothing = subprocess.DEVNULL
        return subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing, preexec_fn=ignore_signals)

    def kill_wait(self) -> float:
        """Seconds from TERM to KILL."""
        found = re.search(r"KillWait\s*=\s*(\d+)", run("scontrol", "show", "config").stdout)
        return 30.0 if found is None else float(found[1])

    def other_nodes(self, excluded: Sequence[str]) -> int:
        """The number of nodes in its partition that it could get instead of its own."""
        words = ["sinfo", "-h", "-N", "-o", "%N %T", *(["-p", self.partition] if self.partition else [])]
        pairs = [line.split() for line in run(*words).stdout.splitlines()]
        names = {pair[0] for pair in pairs if len(pair) == 2 and usable(pair[1])}
        return len(names - {*self.nodes, *excluded})

    def why_ended(self, said: str) -> tuple[Reason, bool]:
        """Why Slurm ended this attempt, and whether it has requeued the job.

        Args:
            said: what it wrote to the batch log.
        """
        now = self.show()
        reason: Reason = "cancelled"
        found = re.findall(rf"JOB {os.environ['SLURM_JOB_ID']} ON .* CANCELLED AT.* DUE TO ([A-Z ]+)", said)
        if found:
            reason = _REASONS.get(found[-1].strip(), "cancelled")
        # Not by the clock: the limit may have changed since the start, and a scancel after the old limit is a scancel.
        if now.get("Reason") == "TimeLimit":
            reason = "time limit"
        # The end is unknown once it is pending; before that, while Slurm waits for the ranks, the reason tells.
        requeued = now.get("EndTime") == "Unknown" or reason == "requeue"
        return "requeue" if requeued and reason == "cancelled" else reason, requeued

    def signal_ranks(self) -> None:
        """Send USR1 to all processes of its steps; launchers ignore it, ranks handle it."""
        run("scancel", "--signal=USR1", self.id)

    def requeue(self) -> str | None:
        """Requeue it. Waits for a controller that is restarting, as nothing else would requeue the job.

        Returns:
            None; or why it failed.
        """
        for _ in range(_TRIES):
            done = run("scontrol", "requeue", self.id)
            if done.returncode == 0 or "is pending execution" in done.stderr:
                return None
            if done.returncode != NO_ANSWER and not is_away(done):
                break
            time.sleep(_PAUSE)
        return done.stderr.strip()

    def leave_out(self, nodes: Sequence[str], job: str) -> str | None:
        """Exclude nodes from a waiting job, in addition to those already excluded.

        Returns:
            None; or why it failed.
        """
        before = self.show(job).get("ExcNodeList", "(null)")
        names = [*([] if before == "(null)" else [before]), *nodes]
        done = run("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(names)}")
        return None if done.returncode == 0 else done.stderr.strip()

    def cancel(self, job: str) -> bool:
        """Cancel another job."""
        return run("scancel", job).returncode == 0

    def submit(self, script: str, flags: Sequence[str], more: Sequence[str], variables: Mapping[str, str]) -> str:
        """Submit a job that begins when this one ends, for whatever reason.

        Args:
            script: as submitted.
            flags: of the script.
            more: options of sbatch, besides those that this job inherited.
            variables: for the script.

        Returns:
            the output of sbatch: the number of the job, or the error.
        """
        limit = run("squeue", "-h", "-j", self.id, "-o", "%l").stdout.strip()
        options = [f"--dependency=afterany:{self.id}", "--export=ALL", "--parsable", f"--job-name={self.name}"]
        options += [f"--nodes={len(self.nodes)}", f"--time={limit}"]
        for option, variable in _OPTIONS.items():
            value = os.environ.get(variable, "")
            if value and value != "(null)":
                options.append(f"--{option}={value}")
        # Variables that describe this job must not describe the next.
        own = {name for name in os.environ if name.startswith("SLURM_")} | {"MASTER_ADDR", "MASTER_PORT"}
        env = {name: value for name, value in os.environ.items() if name not in own - {"SLURM_CONF"}} | dict(variables)
        done = run("sbatch", *options, *more, script, *flags, env=env)
        return (done.stdout or done.stderr).strip()


def listen(heard: Callable[[str], None]) -> None:
    """Call ``heard`` for every USR1 or TERM; never for CONT, which Slurm also sends."""

    def handler(number: int, frame: object) -> None:
        heard("TERM" if number == signal.SIGTERM else "USR1")

    signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGTERM, handler)


#: Variables for the next job: the first job of the chain, and how many jobs may still follow.
_HEAD, _LEFT = "MEGARESUME_CHAIN_HEAD", "MEGARESUME_CHAIN_LEFT"

LAUNCHERS = ("torchrun", "srun", "deepspeed")
#: USR1 reaches every process of a step, and so does TERM at the end of the job: launchers and containers would die.
#: Each task writes a byte when it ignores them.
_IGNORE_SIGNALS = 'trap "" USR1 TERM; printf . >>"$0"; exec "$@"'


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmSettings(LaunchSettings):
    """The settings of the batch script, whose copy by Slurm is running."""

    launcher: str
    train_nodes: str
    requeue: str
    chain: str
    chain_options: str
    exclude_nodes: str
    node_check: str
    save_seconds: str
    srun_options: str
    #: the signal that the script received before the driver listened; -: none.
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

    def srun(self, nodes: Sequence[str], per_node: int, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The command that starts ``per_node`` tasks of ``words`` on each of these nodes, and its environment."""
        options = shlex.split(self.srun_options)
        tasks = len(nodes) * per_node
        command = ["srun", f"--nodes={len(nodes)}", f"--ntasks={tasks}", f"--ntasks-per-node={per_node}"]
        if self.has_spares:
            # Slurm may hold the step of the last attempt for minutes after it lost a node.
            command += [f"--nodelist={','.join(nodes)}", "--overlap"]
        if not any(option.startswith("--cpu-bind") for option in options):
            options.append("--cpu-bind=none")  # ranks use all CPUs of the job
        env = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
        if (python := shutil.which(self.python)) and not self.contained:
            # DeepSpeed compiles at the start if the first ninja is not that of its environment.
            env["PATH"] = f"{Path(python).parent}:{env['PATH']}"
        if cpus := env.get("SLURM_CPUS_PER_TASK"):
            # srun does not inherit it from the job. For our task: all CPUs of the job's tasks on a node.
            on_node = int(cpus) * int(env.get("SLURM_NTASKS_PER_NODE") or 1)
            env["SRUN_CPUS_PER_TASK"] = str(max(1, on_node // per_node))
        return [*command, *options, *words], env

    def check_verdict(self, verdict: Verdict) -> None:
        """Raise UsageError for what every node lacks and starting needs; the training reports the rest better."""
        if self.data in verdict.missing:
            raise self.no_data()
        if script_of(self.train) in verdict.missing:
            raise self.no_script(f" (in {Path.cwd()})")
        for module in modules_of(self.train):
            if f"module {module}" in verdict.missing:
                action = "correct TRAIN, or set PYTHON to the one of the environment that has it"
                raise UsageError(f"PYTHON={self.python} has no module {module}", action=action)
        for module, error in verdict.broken:
            action = f"set PYTHON to one that LAUNCHER={self.launcher} can start"
            raise UsageError(f"PYTHON={self.python} cannot import {module}: {error}", action=action)


def check(settings: SlurmSettings, job: SlurmJob, run_dir: Path) -> int:
    """Check the settings; returns the number of ranks on a node.

    Raises:
        UsageError: a setting is wrong.
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
    """Whether a directory belongs to one task of an array."""
    return name.endswith(task) and not name[: -len(task)][-1:].isdigit()


class Chain:
    """The jobs that follow this one (CHAIN), one after another, for jobs that must not be requeued.

    Args:
        settings: of the script.
        job: this job.
        run_dir: RUN_DIR.
        say: writes a line to the log.
    """

    def __init__(self, settings: SlurmSettings, job: SlurmJob, run_dir: Path, say: Callable[[str], None]) -> None:
        self._settings, self._job, self._run_dir, self._say = settings, job, run_dir, say
        #: the first job of the chain; and the next one, once submitted.
        self.head = job.id
        self.successor: str | None = None
        #: how many jobs may still follow.
        self._left = 0

    def read(self) -> None:
        """Read what the previous job passed on, and what an earlier attempt of this one left."""
        self.head = os.environ.get(_HEAD, self._job.id)
        # A CHAIN written into the script, which every job of the chain sees, does not count: the chain must end.
        self._left = int(os.environ.get(_LEFT, self._settings.chain))
        with suppress(OSError):
            self.successor = self._file.read_text().strip() or None

    def submit(self, excluded: Collection[str]) -> None:
        """Submit the next job before anything is trained, so that it is queued whatever happens to this job.

        Args:
            excluded: nodes that it must not use.
        """
        if not self._left or self.successor is not None:
            return
        settings = self._settings
        variables = {"RUN_DIR": str(self._run_dir), "DATA": settings.data, "REQUEUE": "no"}
        variables |= {"CHAIN_OPTIONS": settings.chain_options, _HEAD: self.head, _LEFT: str(self._left - 1)}
        options = shlex.split(settings.chain_options)
        if excluded:
            options.append(f"--exclude={','.join(excluded)}")
        if settings.has_spares:
            options.append("--no-kill")
        answer = self._job.submit(settings.script, settings.flags, options, variables)
        job = answer.split(";")[0].split("\n")[-1]
        if not job.isdecimal():
            self._say(f"chain: NO job follows: sbatch said: {answer}")
            return
        self.successor = job
        with suppress(OSError):
            self._file.write_text(job + "\n")
        self._say(f"chain: job {job} follows, whatever becomes of this one; {self._left - 1} more may follow it")

    def cancel(self, why: str) -> None:
        """Cancel the next job, which is not needed."""
        if self.successor is not None and self._job.cancel(self.successor):
            self._say(f"chain: job {self.successor} is cancelled: {why}")

    @property
    def _file(self) -> Path:
        return self._run_dir / "logs" / f"successor.{self._job.id}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """The nodes of the ranks, and the address where they meet."""

    nodes: tuple[str, ...]
    ranks_per_node: int
    address: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """The tasks that srun starts."""

    per_node: int
    words: tuple[str, ...]
    #: gets a byte from each task once it can be sent signals.
    ignoring: Path
    env: dict[str, str] = field(default_factory=dict)


def tasks(
    launcher: str, layout: RankLayout, *, python: str, container: Sequence[str], training: Sequence[str], logs: Path
) -> Tasks:
    """The tasks of a launcher.

    Args:
        launcher: one of `LAUNCHERS`.
        layout: where the ranks are.
        python: the Python that they run in.
        container: words before a command on every node; (): none.
        training: the words after ``python``: a script or ``-m`` and a module, and its flags.
        logs: a directory for files of this attempt, visible to all nodes.
    """
    train, python = shlex.join(training), shlex.quote(python)
    nodes, ranks, where = len(layout.nodes), layout.ranks_per_node, (layout.address, str(layout.port))
    per_node, env = 1, {}
    if launcher == "torchrun":
        task = (
            f'exec {python} -m torch.distributed.run --nnodes {nodes} --node-rank "$SLURM_NODEID" '
            f"--master-addr {where[0]} --master-port {where[1]} --nproc-per-node {ranks} {train}"
        )
        # Slurm sends TERM to everything when a job ends. torchrun would kill its ranks; without that, they save.
        env["PET_SIGNALS_TO_HANDLE"] = "SIGINT"
    elif launcher == "srun":
        per_node = ranks
        # Each task sees all GPUs of its node and uses the one with its number: no --gpus-per-task.
        task = (
            "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
            f"LOCAL_WORLD_SIZE={ranks}; exec {python} {train}"
        )
    else:
        # What DeepSpeed would otherwise find out by ssh. It only starts the ranks of its own node.
        hosts = logs / "hostfile"
        hosts.write_text("".join(f"{node} slots={ranks}\n" for node in layout.nodes))
        # For Python, the word after -m is a module; for DeepSpeed, the one after --module.
        if training[0] == "-m":
            train = shlex.join(["--module", *training[1:]])
        task = (
            f"exec {python} -m deepspeed.launcher.runner --hostfile {shlex.quote(str(hosts))} --no_ssh "
            f'--node_rank "$SLURM_NODEID" --master_addr {where[0]} --master_port {where[1]} {train}'
        )
    ignoring = logs / "ignoring"
    words = ("bash", "-c", _IGNORE_SIGNALS, str(ignoring), *container, "bash", "-c", task)
    return Tasks(per_node=per_node, words=words, env=env, ignoring=ignoring)
