"""The driver of a Slurm job: ``launch/slurm/train.sbatch`` becomes `run`.

    settings checked, the count of attempts written before anything starts
    nodes check themselves   -> training under srun; signals are passed on to the ranks
    it ends                  -> `decide` -> requeue, continue the chain, finish, refuse, or
                                            repeat all of this in the same job, if it has spare nodes (TRAIN_NODES)

Every event and every decision is one line in the batch log and in RUN_DIR/logs/batch.log.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megaresume.checkpoint.records.ledger import ATTEMPT
from megaresume.cluster.drivers.attempts import (
    Attempts,
    Ledgers,
    checkpoint_roots,
    read_attempts,
    without_pins,
    write_attempts,
)
from megaresume.cluster.drivers.decide import (
    AttemptHistory,
    AttemptProgress,
    BadNode,
    Decision,
    Reason,
    SlurmState,
    Status,
    choose_nodes,
    decide,
    decide_start,
)
from megaresume.cluster.drivers.driver import LaunchDriver
from megaresume.cluster.drivers.node_check import ask_nodes, judge
from megaresume.cluster.drivers.slurm_job import Chain, RankLayout, SlurmJob, SlurmSettings, check, listen, tasks
from megaresume.runs.logs import find_first_error, last_lines, shell_status
from megaresume.stream.errors import MegaresumeError, UsageError

#: seconds between two looks at the ranks.
_POLL = 0.1
#: seconds for which a task may run before it ignores signals.
_YOUNG = 60.0
#: nodes that Slurm has given up, in srun's words.
_LOST = re.compile(r"Node failure on (\S+)")


def run(settings: SlurmSettings) -> int:
    """Do one attempt from start to end; returns the exit status of the batch script.

    Raises:
        KeyError: not in a Slurm job.
    """
    driver = SlurmDriver(settings, SlurmJob.of_environment())
    try:
        return driver.run()
    except MegaresumeError as error:
        driver.say_refused("refused, and not queued again", error)
    driver.chain.cancel("this job was refused")
    return 2


class SlurmDriver(LaunchDriver):
    """One start of the job by Slurm: one attempt, or several if it has spare nodes."""

    def __init__(self, settings: SlurmSettings, job: SlurmJob) -> None:
        super().__init__(settings, Path(os.path.abspath(settings.run_dir)))
        self.settings, self.job = settings, job
        #: attempts before this one without a requeue; the nodes that train in this one.
        self.again, self.nodes = 0, job.nodes
        self.attempts = Attempts()
        self.chain = Chain(settings, job, self.run_dir, self.say)
        #: signals received and not yet handled.
        self._heard = [] if settings.heard == "-" else [settings.heard]
        #: why Slurm ended this attempt, once it has, and whether it requeued the job.
        self.reason: Reason | None = None
        self.requeued = False
        #: the decision, once made; until when it may still wait for a checkpoint.
        self._done: Decision | None = None
        self._decide_by: float | None = None
        self._step: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        #: see `Tasks`; their number, and when they were started.
        self._ignoring, self._tasks, self._began = Path(), 0, 0.0
        self._batch_log, self._log_size = _batch_log()

    def say(self, words: str) -> None:
        """Write a line to both logs; if the disk is full, it is lost."""
        words = "; ".join(line.strip() for line in words.splitlines())
        line = f"{time.strftime('%FT%T')} [job {self.job.id}, attempt {self._number}] {words}"
        with suppress(OSError):
            print(line, flush=True)
        with suppress(OSError), open(self.run_dir / "logs" / "batch.log", "a", encoding="utf-8") as log:
            log.write(line + "\n")

    # ---- the attempt

    @property
    def _number(self) -> str:
        return f"{self.job.attempt}.{self.again}" if self.again else str(self.job.attempt)

    @property
    def attempt(self) -> str:
        """The unique name of this attempt."""
        return f"{self.job.id}.{self._number}"

    @property
    def logs(self) -> Path:
        """The directory of this attempt's logs."""
        return self.run_dir / "logs" / self.attempt

    def run(self) -> int:
        """Run the attempt, see `run`.

        Raises:
            MegaresumeError: it cannot begin.
        """
        listen(self._heard.append)
        ranks = self._check()
        while True:
            exit_status = self._run_once(ranks)
            if self._done is None or self._done.action != "again":
                return exit_status
            self.again, self._done = self.again + 1, None

    def _run_once(self, ranks: int) -> int:
        self._count()
        if self.settings.has_spares:
            self._choose_nodes()
        self.say_start(ranks)
        if self.settings.requeue == "no":
            self.chain.submit(self.attempts.excluded)
        # A stop file that came too late for the last attempt would stop this one.
        self.stop_file.unlink(missing_ok=True)
        ledgers = Ledgers(checkpoint_roots(self.training, Path.cwd()), self.attempt)
        status = self._check_nodes(ranks)
        if status is None:
            status = self._train(ranks, ledgers)
        return self._end(status, ledgers)

    def _check(self) -> int:
        """Check the settings; returns the number of ranks on a node."""
        ranks = check(self.settings, self.job, self.run_dir)
        self.chain.read()
        return ranks

    def _count(self) -> None:
        """Count this attempt, on disk before anything starts, so that it counts even if nobody sees it end."""
        self.make_run_dir(self.logs, "set RUN_DIR to a directory that all nodes can write to")
        self.attempts = read_attempts(self._attempts_file)
        if (decision := decide_start(self.history)) is not None:
            action = "look at the logs of those attempts; the same sbatch command counts from 0"
            raise UsageError(decision.why, action=action)
        write_attempts(self._attempts_file, replace(self.attempts, fruitless=self.attempts.fruitless + 1))
        if self.attempts.best is not None:
            self.training, pins = without_pins(self.training)
            if pins:
                saved = f"an attempt before has saved up to step {self.attempts.best}, and this one resumes from there"
                self.say(f"{' '.join(pins)} is left out: {saved}")

    def _choose_nodes(self) -> None:
        """Choose the training nodes from those left; other nodes watch whether the node of this driver is alive."""
        left = self.job.nodes_left()
        self.nodes = choose_nodes(left, int(self.settings.train_nodes), self.attempts.replaced)
        others = [node for node in left if node != os.environ.get("SLURMD_NODENAME")]
        if self._watch is not None:
            self._watch.kill()
            self._watch.wait()
        if others:
            watching = sorted(others, key=self.nodes.__contains__)[:2]
            log = self.run_dir / "logs" / "batch.log"
            self._watch = self.job.watch(watching, log, requeue=self.settings.requeue == "yes")

    def _spares(self, bad: Sequence[BadNode]) -> int | None:
        """See `SlurmState`."""
        if not self.settings.has_spares:
            return None
        failed = {*self.attempts.replaced, *(node.name for node in bad)}
        return sum(node not in failed for node in self.job.nodes_left()) - len(self.nodes)

    @property
    def history(self) -> AttemptHistory:
        """The attempts before this one."""
        return AttemptHistory(
            fruitless=self.attempts.fruitless,
            best=self.attempts.best,
            max_restarts=int(self.settings.max_restarts),
            excluded=tuple(self.attempts.excluded),
            max_excluded=int(self.settings.exclude_nodes),
        )

    @property
    def _attempts_file(self) -> Path:
        return self.run_dir / "logs" / f"attempts.{self.chain.head}.json"

    def say_start(self, ranks: int) -> None:
        """Log the first line of an attempt."""
        job = self.job
        self.end = job.end_time()
        # By job and attempt, so that two jobs on one node do not meet at it, nor this one a lost attempt's leftovers;
        # below the system's ports for outgoing connections.
        port = 10000 + (int(os.environ["SLURM_JOB_ID"]) + 7919 * job.attempt + 613 * self.again) % 20000
        self.layout = RankLayout(
            nodes=self.nodes, ranks_per_node=ranks, address=job.address_of(self.nodes[0]), port=port
        )
        nodes = ",".join(self.nodes) + f" of {job.node_list}" if self.settings.has_spares else job.node_list
        limit = "none" if self.end is None else time.strftime("%FT%T", time.localtime(self.end))
        self.say(
            f"start: restart count {job.attempt}; {len(self.nodes)} node(s) {nodes}, {ranks} rank(s) on each, "
            f"meeting at {self.layout.address}:{port}; time limit {limit}; logs in {self.logs}"
        )
        for node, why in self.attempts.excluded.items():
            self.say(f"node {node} is left out: {why}")
        for node, why in self.attempts.replaced.items():
            self.say(f"node {node} is used only if there is no other: {why}")

    def _check_nodes(self, ranks: int) -> Status | None:
        """Run the check on every node; None if all are fine."""
        if self.settings.node_check == "no":
            return None
        gpus = ranks if self.job.asked_for_gpus() else 0
        words = [*self.settings.container, self.settings.python, "-m", "megaresume.cluster.drivers.node_check"]
        words += [str(self.run_dir), self.settings.data_config, str(gpus)]
        words += [self.layout.address, str(self.layout.port), str(len(self.nodes)), self.settings.launcher]
        words += [*self.settings.train, *self.settings.flags]
        command, env = self.settings.srun(self.nodes, 1, ["--export=ALL", *words])
        answers, received, said = ask_nodes(command, env)
        self._hear()
        if self.reason is not None:
            return Status(exit=1)
        if not answers:
            return Status(exit=1, unchecked=True, error=f"no node has answered: {' '.join(said[-3:])}")
        if set(answers) == set(self.nodes):
            verdict = judge(self.nodes, answers, received)
            bad = verdict.bad
        else:  # several nodes on one machine may all have its name
            verdict = judge(tuple(answers), answers, received)
            bad = verdict.bad
            if len(answers) > 1 or len(set(answers) & set(self.nodes)):
                bad = (*bad, *(BadNode(name=n, why="did not answer") for n in self.nodes if n not in answers))
        self.settings.check_verdict(verdict)
        if not bad:
            return None
        for node in bad:
            self.say(f"node {node.name} fails its check: {node.why}")
        return Status(exit=1, bad_nodes=bad, unchecked=True)

    def _train(self, ranks: int, ledgers: Ledgers) -> Status:
        settings, layout = self.settings, self.layout
        started = tasks(
            settings.launcher,
            layout,
            python=settings.python,
            container=settings.container,
            training=self.training,
            logs=self.logs,
        )
        # When a task fails, the others would only wait for it, so they are ended; when one ends successfully, the
        # others may still be writing their part of the checkpoint.
        more = ["--kill-on-bad-exit=1", f"--wait={settings.save_seconds}", "--export=ALL"]
        command, env = settings.srun(
            self.nodes, started.per_node, [*more, f"--output={self.logs}/%N.log", *started.words]
        )
        env |= started.env | {ATTEMPT: self.attempt, "MASTER_ADDR": layout.address, "MASTER_PORT": str(layout.port)}
        if self.end is not None:
            # The ranks warn if a save takes longer than the time left.
            env["MEGARESUME_JOB_END_TIME"] = str(self.end)
        said = self.logs / "srun.txt"
        with open(said, "wb") as file:
            self._step = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=file)
        self._ignoring, self._tasks = started.ignoring, started.per_node * len(self.nodes)
        self._began = time.monotonic()
        if self.signal is not None:
            self._pass_on()
        while (exit_status := self._step.poll()) is None:
            self._hear()
            if self._decide_by is not None and time.monotonic() > self._decide_by:
                self._decide_by = None
                self._act(self._decide(Status(exit=1), self._progress(ledgers)))
            elif self.reason is not None and self._done is None and self._decide_by is None:
                self._decide_early(ledgers)
            time.sleep(_POLL)
        self._step = None
        self._hear()
        return self._status(shell_status(exit_status), said.read_text(errors="replace"))

    def _status(self, exit_status: int, said: str) -> Status:
        if said.strip():
            print("\n".join(line[:240] for line in said.splitlines()[-20:]), flush=True)
        if self.settings.has_spares and (lost := set(_LOST.findall(said))):
            # Ranks that srun ended because of lost nodes have not failed.
            bad = tuple(BadNode(name=node, why="Slurm has lost it") for node in self.nodes if node in lost)
            return Status(exit=exit_status, bad_nodes=bad)
        if exit_status == 0 or self.reason is not None:
            return Status(exit=exit_status)
        error = find_first_error(sorted(self.logs.glob("*.log")), said)
        if error is None:
            return Status(exit=exit_status)
        self.say(f"{error}: {error.headline or 'it printed no error'}")
        shown = error.lines or last_lines(self.logs / f"{error.node}.log")
        print("\n".join(f"  {line}" for line in shown), flush=True)
        # The log may contain the name of a machine that acts as several nodes.
        is_bad = error.node in self.nodes and not error.is_victim
        bad = (BadNode(name=error.node, why=f"{error}: {error.headline}"),) if is_bad else ()
        of_node = is_bad and error.is_lacking and len(self.nodes) > 1
        return Status(exit=exit_status, rank_exit=error.exit, error=error.headline, bad_nodes=bad, of_node=of_node)

    # ---- signals

    def _hear(self) -> None:
        while self._heard:
            name = self._heard.pop(0)
            is_first, self.signal = self.signal is None, self.signal or name
            if name == "TERM" and self.reason is None and self.job.state() != "RUNNING":
                self._ended_by_slurm()
            elif is_first:
                self.say(f"{name} came: all ranks save at the end of their step")
                if self._step is not None:
                    self._pass_on()
            else:
                self.say(f"{name} came: changes nothing, the ranks have been told")

    def _pass_on(self) -> None:
        self.touch_stop_file()
        ignoring = 0
        with suppress(OSError):
            ignoring = self._ignoring.stat().st_size
        # Otherwise it would kill tasks that have just begun. Do not wait longer because a full disk takes no byte.
        if ignoring >= self._tasks or time.monotonic() > self._began + _YOUNG:
            self.job.signal_ranks()

    def _ended_by_slurm(self) -> None:
        """Slurm is ending the job, and kills what still runs after KillWait."""
        self.reason, self.requeued = self.job.why_ended(self._said_by_slurm())
        self.touch_stop_file()  # the ranks got the TERM as well
        if self.requeued:
            self.say(f"TERM came: Slurm ends this attempt and has queued the job again itself ({self.reason})")
        elif self.reason == "cancelled":
            self.say("TERM came: the job was cancelled, so it is not queued again; the same sbatch command continues")
            self.chain.cancel("this job was cancelled")
        else:
            self.say(f"TERM came: Slurm ends this attempt ({self.reason})")

    def _decide_early(self, ledgers: Ledgers) -> None:
        """Requeue the job while there is time; if that needs a new checkpoint, wait for it for a while."""
        decision = self._decide(Status(exit=1), self._progress(ledgers))
        if self.requeued or self.reason == "cancelled":
            self._done = decision
        elif decision.action == "refuse":
            self._decide_by = time.monotonic() + self.job.kill_wait() / 2
        else:
            self._act(decision)

    def _said_by_slurm(self) -> str:
        try:
            with open(self._batch_log, encoding="utf-8", errors="replace") as log:
                log.seek(self._log_size)
                return log.read()
        except OSError:
            return ""

    # ---- what comes next

    def _decide(self, status: Status, progress: AttemptProgress) -> Decision:
        slurm = SlurmState(
            reason=self.reason,
            requeued=self.requeued,
            # Asked only now: while the ranks wait for the signal, do not wait for the controller.
            preempting=self.signal is not None and self.reason is None and self.job.is_preempted(),
            may_requeue=self.settings.requeue == "yes",
            successor=self.chain.successor,
            other_nodes=self.job.other_nodes(tuple(self.attempts.excluded)) if status.bad_nodes else 0,
            spares=self._spares(status.bad_nodes) if self.reason is None else None,
        )
        return decide(status, self.signal, slurm, progress, self.history)

    def _progress(self, ledgers: Ledgers, status: int | None = None) -> AttemptProgress:
        try:
            return ledgers.progress(status=status)
        except MegaresumeError as error:
            self.say(f"{error.line}: taken for no progress")
            return AttemptProgress()

    def _end(self, status: Status, ledgers: Ledgers) -> int:
        progress = self._progress(ledgers, status.exit)
        decision = self._decide(status, progress)
        if self._done is None and self.reason is None:
            self._act(decision)
        else:
            saved = "none" if progress.saved is None else f"at step {progress.saved}"
            self.say(f"the ranks ended with {status}; new checkpoint: {saved}")
            if self._done is None and not (self.requeued or self.reason == "cancelled"):
                self._act(decision)
            else:
                self._keep(decision)
        return 0 if decision.action == "finish" else status.exit or int(decision.action == "refuse" and not self.signal)

    def _keep(self, decision: Decision) -> None:
        nodes = {node.name: node.why for node in decision.exclude}
        kept = "replaced" if decision.action == "again" else "excluded"
        attempts = replace(self.attempts, **{kept: getattr(self.attempts, kept) | nodes})
        attempts = replace(attempts, fruitless=decision.fruitless, best=decision.best)
        try:
            write_attempts(self._attempts_file, attempts)
        except MegaresumeError as error:
            self.say(error.line)

    def _act(self, decision: Decision) -> None:
        self._done = decision
        self._keep(decision)
        why = decision.why
        if decision.action == "finish":
            self.say(f"{why}; not queued again")
            self.chain.cancel("the run is over")
        elif decision.action == "refuse":
            self.say(f"NOT queued again: {why}")
            self.chain.cancel(why)
        elif decision.action == "again":
            self.say(f"again in this job: {why}")
            for node in decision.exclude:
                self.say(f"node {node.name} is replaced by a spare one: {node.why}")
        elif decision.action == "chain":
            self.say(f"not queued again, REQUEUE=no, but job {self.chain.successor} follows: {why}")
            self._leave_out(decision, self.chain.successor or "")
        else:
            refused = self.job.requeue()
            self.say(f"queued again: {why}" if refused is None else f"NOT queued again, although {why}: {refused}")
            if refused is None:
                self._leave_out(decision, self.job.id)

    def _leave_out(self, decision: Decision, job: str) -> None:
        names = [node.name for node in decision.exclude]
        if not names:
            return
        refused = self.job.leave_out(names, job)
        for node in decision.exclude:
            kept = "" if refused is None else f", but Slurm refuses that: {refused}"
            self.say(f"node {node.name} is left out from now on{kept}: {node.why}")


def _batch_log() -> tuple[str, int]:
    """The file that this process prints to, and its current size."""
    try:
        path = os.readlink("/proc/self/fd/2")
        return path, os.stat(path).st_size
    except OSError:
        return os.devnull, 0
