"""Launches as jobs of a Slurm cluster; checks before anything runs whether it can run the test.

    sbatch --nodes=2 SCRIPT FLAGS       attempt 0   RUNNING
      stopped in some way               ->          PENDING, requeued by Slurm or by its script: held
      scontrol update NumNodes=3-3      ->          released
                                        attempt 1   RUNNING on other nodes, same flags
    a job that ended instead            ->          a new sbatch with the flags of the next launch

States are polled: `sbatch --wait` only looks now and then. Before the first launch:

    partition, nodes, limits        asked of the controller
    clocks, the shared directory    asked of as many nodes as the largest launch has, by one `srun`
    operator, urgent partition      only if a kind of stop needs them
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from megaresume.cluster.drivers.slurm_commands import (
    Partition,
    ask,
    find_partitions,
    nodes_of,
    option,
    script_options,
    try_to,
    usable,
    version,
)
from megaresume.cluster.launcher import Kind, Launch, RunningLaunch
from megaresume.cluster.smoke.slurm_job import SlurmAttempt, end, undo
from megaresume.shipped import launch_script
from megaresume.stream.errors import SetupError, UsageError

#: seconds between a stop and the end of the attempt: for saves, and for timeouts of waiting ranks.
GRACE = 300.0
#: seconds in the queue.
QUEUE = 1800.0
_OWN = "slurm/train.sbatch"


class SlurmLauncher:
    """Starts a batch script on the cluster that ``sinfo`` shows.

    Args:
        script: for sbatch; it passes on its arguments, like ``launch/slurm/train.sbatch``. None: ours.
        launch: the launcher in our script.
        partition: None: that of the script or of the options, else the default one.
        urgent_partition: one whose jobs preempt; None: found by its priority.
        options: words for sbatch, like ``--account=x``.
        grace: seconds, see `GRACE`.
        queue: seconds, see `QUEUE`.
    """

    def __init__(
        self,
        script: Path | None = None,
        *,
        launch: Literal["torchrun", "deepspeed"] = "torchrun",
        partition: str | None = None,
        urgent_partition: str | None = None,
        options: Sequence[str] = (),
        grace: float = GRACE,
        queue: float = QUEUE,
    ) -> None:
        self.script = launch_script(_OWN) if script is None else script.resolve()
        # No node is excluded because of a rank that the test killed.
        self._settings = {"LAUNCHER": launch, "EXCLUDE_NODES": "0"} if script is None else {}
        self.options = tuple(options)
        self.grace, self.queue = grace, queue
        self._partition_name, self._urgent_name = partition, urgent_partition
        self.description = "Slurm"

    @cached_property
    def partition(self) -> Partition:
        """The partition in which the jobs run.

        Raises:
            UsageError: see `choose_partition`.
        """
        words = [*script_options(self.script), *self.options]
        return choose_partition(self._partition_name or option(words, "partition", "p"))

    @property
    def urgent(self) -> Partition:
        """The partition whose jobs preempt.

        Raises:
            UsageError, SetupError: see `choose_urgent`.
        """
        return choose_urgent(self.partition, self._urgent_name)

    def check(self, launches: Sequence[Launch], kinds: Sequence[Kind]) -> None:
        """See `Launcher`."""
        words = [*script_options(self.script), *self.options]
        refuse_array(words)
        release = version()
        most = max(launch.nodes for launch in launches)
        nodes = enough_nodes(self.partition, most)
        working = [node for node, state in nodes.items() if usable(state)]
        if "preempt" in kinds:
            _ = self.urgent
        if "node-down" in kinds:
            may_set_nodes_down(working[0])
        # One more than a launch has, if possible: the job that lost a node continues there.
        count = min(len(working), most + ("node-down" in kinds), self.partition.max_nodes or len(working))
        for directory in sorted({launch.run_dir.parent for launch in launches}):
            directory.mkdir(parents=True, exist_ok=True)
            asked = check_nodes(self.partition, count, directory, words, timeout=self.queue)
        self.description = f"Slurm {release}, partition {self.partition.name}: {len(nodes)} nodes, {len(asked)} asked"

    def start(self, launch: Launch, *, after: RunningLaunch | None = None) -> RunningLaunch:
        """See `Launcher`.

        Raises:
            SetupError: it never starts, or not in time.
        """
        job = self._again(after, launch) if isinstance(after, SlurmAttempt) and after.waits() else None
        job = job or self._submit(launch)
        try:
            job.wait_for_start(self.queue)
        except BaseException:
            job.close()
            raise
        if isinstance(after, SlurmAttempt):
            undo(after.lost)
        return job

    def _submit(self, launch: Launch) -> SlurmAttempt:
        logs = launch.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        # Ours come last, and take precedence.
        words = ["sbatch", *self.options, "--parsable", f"--nodes={launch.nodes}"]
        words += [f"--job-name=megaresume-smoke-{launch.name}"]
        words += ["--open-mode=append", f"--output={logs / 'slurm-%j.log'}", "--export=ALL"]
        words += [f"--partition={self.partition.name}", str(self.script), *launch.flags]
        answer = ask(*words, env=os.environ | self._settings | dict(launch.env), failing="sbatch refuses the job")
        return self._job(launch, answer.strip().split(";")[0], restarts=0)

    def _again(self, after: SlurmAttempt, launch: Launch) -> SlurmAttempt | None:
        """The requeued job, with the nodes of the next launch; None if it cannot be changed, and was cancelled."""
        info = after.info
        assert info is not None  # it is pending
        tasks = launch.nodes * max(1, after.tasks_per_node)
        changes = [f"NumNodes={launch.nodes}-{launch.nodes}", f"NumTasks={tasks}"]
        changes.append(f"NumCPUs={tasks * info.cpus_per_task}")  # otherwise it would wait for those of the old nodes
        if info.time_limit != after.time_limit:
            changes.append(f"TimeLimit={'UNLIMITED' if after.time_limit is None else after.time_limit}")
        if after.lost.node and launch.nodes > sum(map(usable, nodes_of(self.partition.name).values())):
            undo(after.lost)  # there are no other nodes
        done = try_to("scontrol", "update", f"JobId={after.id}", *changes)
        if done.returncode == 0:
            done = try_to("scontrol", "release", after.id)
        if done.returncode:
            end(after.id)
            return None
        after.handed_over = True
        return self._job(launch, after.id, restarts=info.restarts)

    def _job(self, launch: Launch, job: str, *, restarts: int) -> SlurmAttempt:
        return SlurmAttempt(
            launch, job, restarts=restarts, partition=self.partition, urgent=lambda: self.urgent, grace=self.grace
        )


# What nodes see: their time, and the directory of the test. All of them are asked at once, by one `srun`.
#
#     srun  ->  node: ready, the token as it reads it, whether it could write beside it       one line per node
#           <-  now                                                                           when all are there
#           ->  node: its time


#: seconds by which a node's clock may be off.
CLOCK_TOLERANCE = 2.0
#: seconds until a network file system shows another machine's new file.
_VISIBLE_WITHIN = 10.0
#: options of sbatch for where a job may run, which also apply to this check.
_WHERE = {"account": "A", "qos": "q", "reservation": "", "constraint": "C", "exclude": "x", "clusters": "M"}

# Runs on every node: prints what it sees, waits for the word, prints its time.
_QUESTION = """
name=${SLURMD_NODENAME:-$(hostname)}
seen=$(cat "$MEGARESUME_TOKEN" 2>/dev/null)
wrote=no
if echo "$name" 2>/dev/null >"$MEGARESUME_TOKEN.$name"; then wrote=yes; fi
echo "megaresume|$name|ready|$seen|$wrote"
read -r _
echo "megaresume|$name|clock|$(date +%s.%N)|"
"""


@dataclass(kw_only=True, slots=True)
class _Answers:
    """The answers of the nodes, by name."""

    #: the token as each node read it, and whether it could write beside it.
    seen: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: their time; this machine's when they were asked and when all had answered. Seconds of `time.time`.
    clocks: dict[str, float] = field(default_factory=dict)
    asked: float = 0.0
    answered: float = 0.0


def check_nodes(
    partition: Partition, count: int, directory: Path, options: Sequence[str], *, timeout: float
) -> tuple[str, ...]:
    """Ask nodes for their time, and for their view of a directory.

    Args:
        partition: of the nodes.
        count: number of nodes to ask.
        directory: of the smoke test; it exists.
        options: of sbatch; only those for where a job may run are used.
        timeout: seconds, most of which may be spent in the queue.

    Returns:
        the names of the nodes.

    Raises:
        SetupError: clocks that differ, a directory that a node does not see or cannot write to, no nodes in time.
    """
    token = directory / f".megaresume-{uuid.uuid4().hex[:12]}"
    content = uuid.uuid4().hex
    token.write_text(content, encoding="utf-8")
    try:
        answers = _ask_nodes(partition, count, token, options, timeout)
        _check_directory(directory, token, content, answers.seen)
    finally:
        for path in (token, *directory.glob(f"{token.name}.*")):
            path.unlink(missing_ok=True)
    _check_clocks(answers)
    return tuple(sorted(answers.seen))


def _ask_nodes(partition: Partition, count: int, token: Path, options: Sequence[str], timeout: float) -> _Answers:
    where = [f"--{name}={value}" for name, short in _WHERE.items() if (value := option(options, name, short))]
    words = ["srun", "--quiet", f"--partition={partition.name}", f"--nodes={count}", f"--ntasks={count}", *where]
    # The nodes may lack this directory, which would cause a warning for every task.
    words += ["--ntasks-per-node=1", "--chdir=/", "--job-name=megaresume-smoke-check", "bash", "-c", _QUESTION]
    env = os.environ | {"MEGARESUME_TOKEN": str(token.resolve())}
    answers, said = _Answers(), []
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdin is not None
        try:
            for line in _lines(process, timeout):
                parts = line.rstrip("\n").split("|")
                if parts[0] != "megaresume":
                    said.append(line)
                elif parts[2] == "ready":
                    answers.seen[parts[1]] = (parts[3], parts[4])
                    if len(answers.seen) == count:
                        # All are waiting for the word, so the time from here does not include the queue.
                        answers.asked = time.time()
                        process.stdin.write("now\n")
                        process.stdin.flush()
                else:
                    answers.clocks[parts[1]] = float(parts[3])
                if len(answers.clocks) == count:
                    answers.answered = time.time()
                    return answers
        finally:
            if len(answers.clocks) < count:
                process.terminate()
    raise SetupError(
        f"{count} nodes of partition {partition.name} did not answer",
        found="".join(said).strip() or f"{len(answers.seen)} answers in {timeout:.0f} seconds",
        expected=f"an answer of each within {timeout:.0f} seconds",
        cause="the queue is long, or a job may not run there",
        action="squeue --start; fewer --nodes; --sbatch-options for an account, a QOS or a reservation",
    )


def _lines(process: subprocess.Popen[str], timeout: float) -> Iterator[str]:
    """The output of a process, by line, until it ends or ``timeout`` seconds have passed."""
    stdout = process.stdout
    assert stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + timeout
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return
        if line is None:
            return
        yield line


def _check_directory(directory: Path, token: Path, content: str, seen: dict[str, tuple[str, str]]) -> None:
    blind = sorted(node for node, (text, _) in seen.items() if text != content)
    mute = sorted(node for node, (_, wrote) in seen.items() if wrote != "yes")
    deadline = time.monotonic() + _VISIBLE_WITHIN
    missing = [node for node in sorted(seen) if node not in mute]
    while missing and not blind:
        missing = [node for node in missing if not Path(f"{token}.{node}").exists()]
        if time.monotonic() > deadline:
            break
        time.sleep(0.05 if missing else 0)
    bad = blind or mute or missing
    if bad:
        what = "does not see" if blind else "cannot write to" if mute else "writes elsewhere than this machine, in"
        raise SetupError(
            f"not every node shares {directory}",
            found=f"{', '.join(bad)} {what} it, of {', '.join(sorted(seen))}",
            expected="one directory that this machine and all nodes read and write",
            cause="a local disk, such as /tmp, or a file system that is not mounted there",
            action="--out with a directory on shared storage",
        )


def _check_clocks(answers: _Answers) -> None:
    asked, answered = answers.asked, answers.answered
    off = {node: min(0.0, at - asked) + max(0.0, at - answered) for node, at in answers.clocks.items()}
    wrong = {node: seconds for node, seconds in off.items() if abs(seconds) > CLOCK_TOLERANCE}
    if wrong:
        raise SetupError(
            "clocks of nodes differ from this machine's",
            found=", ".join(
                f"{node} is {abs(seconds):.1f} s {'behind' if seconds < 0 else 'ahead'}"
                for node, seconds in sorted(wrong.items())
            ),
            expected=f"at most {CLOCK_TOLERANCE:.0f} s: times are compared between nodes, and Slurm refuses "
            "credentials that are too old",
            cause="chrony or ntpd does not run there",
            action=f"on {min(wrong)}: chronyc makestep; or --sbatch-options with --exclude={','.join(sorted(wrong))}",
        )


def choose_partition(name: str | None) -> Partition:
    """The partition of that name, or the default one.

    Raises:
        UsageError: there is none, or it is closed.
        SetupError: see `ask`.
    """
    partitions = find_partitions()
    chosen = next((p for p in partitions if (p.default if name is None else p.name == name)), None)
    names = ", ".join(p.name + (" (default)" if p.default else "") for p in partitions)
    if chosen is None:
        raise UsageError(
            "no partition was named, and there is no default one" if name is None else f"there is no partition {name}",
            found="no --partition" if name is None else f"--partition {name}",
            expected=f"one of {names}",
            action=f"--partition {partitions[0].name}" if partitions else "sinfo",
        )
    if not chosen.up:
        raise UsageError(
            f"partition {chosen.name} starts no jobs",
            found="it is not up",
            expected=f"one that is, of {names}",
            action="--partition NAME",
        )
    return chosen


def refuse_array(options: Sequence[str]) -> None:
    """Refuse a job array: all of its jobs would write to one directory.

    Raises:
        UsageError: it is one.
    """
    array = option(options, "array", "a")
    if array is not None:
        raise UsageError(
            "a job array cannot be tested",
            found=f"--array={array}",
            expected="one job: all jobs of an array would write to the same run directory",
            action="leave out --array in --sbatch-options and in the #SBATCH lines of the script",
        )


def enough_nodes(partition: Partition, most: int) -> dict[str, str]:
    """The nodes of the partition, by name, with their states.

    Raises:
        UsageError: fewer are usable than a launch needs.
    """
    nodes = nodes_of(partition.name)
    working = [node for node, state in nodes.items() if usable(state)]
    out = ", ".join(f"{node} {state}" for node, state in nodes.items() if not usable(state))
    if most > len(working):
        raise UsageError(
            f"partition {partition.name} has too few nodes",
            found=f"--nodes {most}; {len(working)} of {len(nodes)} nodes can be used"
            + (f" (not: {out})" if out else ""),
            expected=f"at most {len(working)}",
            action=f"--nodes {len(working)}, another --partition, or `scontrol update nodename=... state=resume`",
        )
    if partition.max_nodes is not None and most > partition.max_nodes:
        raise UsageError(
            f"a job of partition {partition.name} may not have so many nodes",
            found=f"--nodes {most}, MaxNodes={partition.max_nodes}",
            expected=f"at most {partition.max_nodes}",
            action=f"--nodes {partition.max_nodes}, or another --partition",
        )
    return nodes


def choose_urgent(partition: Partition, name: str | None) -> Partition:
    """A partition whose jobs preempt those of ``partition``.

    Raises:
        UsageError: the named one does not exist, or does not preempt.
        SetupError: there is none.
    """
    partitions = find_partitions()
    able = [p for p in partitions if p.up and p.priority > partition.priority and partition.preemptable]
    chosen = next((p for p in able if name is None or p.name == name), None)
    if chosen is not None:
        return chosen
    found = ", ".join(f"{p.name} (priority {p.priority})" for p in partitions)
    if name is not None:
        raise UsageError(
            f"jobs of partition {name} do not preempt those of {partition.name}",
            found=f"--urgent-partition {name}; partitions: {found}",
            expected=", ".join(p.name for p in able) or f"a partition of a higher priority than {partition.priority}",
            action=f"--urgent-partition {able[0].name}" if able else "leave preempt out of --kill",
        )
    raise SetupError(
        f"no partition preempts {partition.name}",
        found=f"partitions: {found}"
        + ("" if partition.preemptable else f"; jobs of {partition.name} cannot be preempted by a partition"),
        expected=f"one whose PriorityTier is above {partition.priority}, and PreemptType=preempt/partition_prio",
        action="leave preempt out of --kill: requeue and sigterm do to the job what a preemption does",
    )


def may_set_nodes_down(node: str) -> None:
    """Check that this user may set nodes down, by an update without effect.

    Raises:
        SetupError: no.
    """
    words = ask("scontrol", "show", "node", "--oneliner", node).split()
    weight = next((word.removeprefix("Weight=") for word in words if word.startswith("Weight=")), "1")
    done = try_to("scontrol", "update", f"nodename={node}", f"weight={weight}")
    if done.returncode:
        raise SetupError(
            "you may not set nodes down",
            found=f"scontrol update: {done.stderr.strip() or done.stdout.strip()}",
            expected="an operator or administrator of this Slurm",
            action="leave node-down out of --kill: sigkill loses a rank without warning as well; "
            "or try node-down on your own cluster: docs/slurm.md",
        )
