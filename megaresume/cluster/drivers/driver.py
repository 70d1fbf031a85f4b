"""What the drivers of all launch scripts have in common.

    Settings, Driver   the training command, how they say what they do
    Attempts           what an attempt leaves for the next
    Ledgers            what it has written to the ledger of its checkpoints, as a `AttemptProgress`
    decide             what follows an attempt, from what is known when it has ended
    choose_nodes       the nodes that spares replace

`decide` and `choose_nodes` are pure: they ask nobody and do nothing.

    the run says that it is over                   finish
    somebody cancelled the job                     refuse
    a mistake in the flags or the data             refuse; but not what one node alone lacks
    Slurm has queued the job again itself          requeue
    too many attempts without a new checkpoint     refuse
    spare nodes, and nobody wants it to stop       again, in this job
    anything else                                  requeue; chain, if requeue is not allowed and a job follows

An exit status of 0 is no proof of an end: srun gives it after a node failure, a run that was told to stop ends with it,
and a program that trains nothing does so forever.

The count of attempts is written, and is on the disk, before anything is launched: an attempt that nobody sees end is
counted, and a run directory that takes no more bytes refuses the launch instead of beginning forever "for the first
time".

Of a ledger the lines after those that were there when the attempt began count, unless another attempt signed them: a
job that has lost the directory to another one does not take its checkpoints for its own.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megaresume.checkpoint.records.ledger import LedgerEntry, read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.checkpoint.records.sealed import count, from_members, members, read_record, seal
from megaresume.checkpoint.starts import NOTHING_TO_TRAIN
from megaresume.files import make_dir, write_atomic
from megaresume.stream.errors import CheckpointError, MegaresumeError, SetupError, StateError, UsageError

Action = Literal["finish", "again", "requeue", "chain", "refuse"]
#: why Slurm has ended an attempt. ``requeue``: somebody's `scontrol requeue`.
Reason = Literal["cancelled", "time limit", "preemption", "node failure", "requeue"]
#: The ends of an attempt that excuse it from having saved: they are nobody's fault.
_FROM_OUTSIDE: tuple[Reason | None, ...] = ("preemption", "requeue")
#: exit status of a program that was called in a wrong way.
USAGE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BadNode:
    """A node that something is wrong with."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The end of a training."""

    #: exit status of the launcher.
    exit: int
    #: exit status of the rank that failed first, which launchers hide; None if not known.
    rank_exit: int | None = None
    #: the first error of that rank, one line; "": not known.
    error: str = ""
    #: nodes that failed their check before the training, or the one of that rank.
    bad_nodes: tuple[BadNode, ...] = ()
    #: whether the training was not begun, because nodes failed their check.
    unchecked: bool = False
    #: whether that error is of something that one of several nodes lacks: the flags are right, the node is not.
    of_node: bool = False

    def __str__(self) -> str:
        hidden = f" ({self.rank_exit} of the rank that failed first)" if self.rank_exit not in (None, self.exit) else ""
        return f"status {self.exit}{hidden}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmState:
    """Slurm's view of the attempt, and what may follow it."""

    #: why Slurm has ended it; None if it has not.
    reason: Reason | None = None
    #: whether Slurm has queued the job again by itself.
    requeued: bool = False
    #: whether it has announced a preemption by the signal that the job asked for, and not ended the attempt yet.
    preempting: bool = False
    #: whether the job may be queued again (REQUEUE).
    may_requeue: bool = True
    #: the next job of the chain; None if there is none.
    successor: str | None = None
    #: nodes that the job could have in place of its own.
    other_nodes: int = 0
    #: nodes of this job that would be left over if it continued without those that failed; negative: too few to
    #: continue. None if all of its nodes train (TRAIN_NODES is not given).
    spares: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptProgress:
    """The progress of an attempt, by the lines that it wrote to the ledger of its checkpoints; never another job's."""

    #: the last step, if the run has said that it is over.
    finished: int | None = None
    #: the step of its newest checkpoint; None if it has saved none.
    saved: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptHistory:
    """The earlier attempts, in this job or its chain."""

    #: attempts in a row without a new checkpoint.
    fruitless: int = 0
    #: the furthest step that an attempt has saved; None if none has saved.
    best: int | None = None
    #: how many failures the run comes back from (MAX_RESTARTS).
    max_restarts: int = 3
    #: nodes that are left out, and how many may be (EXCLUDE_NODES).
    excluded: tuple[str, ...] = ()
    max_excluded: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The next action."""

    action: Action
    #: the reason, one line for people.
    why: str
    #: attempts in a row without a new checkpoint, with this one.
    fruitless: int = 0
    #: the furthest step that was saved, by this one too.
    best: int | None = None
    #: nodes to leave out from now on; ``again``: that spare ones replace.
    exclude: tuple[BadNode, ...] = ()


def decide(
    status: Status, signal: str | None, slurm: SlurmState, progress: AttemptProgress, history: AttemptHistory
) -> Decision:
    """Decide what follows an attempt.

    A checkpoint is new if no attempt before has come so far: one that begins at the same early step each time, as a
    flag may say, does the same steps forever.

    Args:
        status: how the training has ended.
        signal: the first one that the driver got; None: none.
        slurm: what Slurm says.
        progress: what the attempt has saved.
        history: what came before.
    """
    steps = [step for step in (progress.saved, history.best) if step is not None]
    decision = _decide(status, signal, slurm, progress, history)
    return replace(decision, best=max(steps, default=None))


def _decide(
    status: Status, signal: str | None, slurm: SlurmState, progress: AttemptProgress, history: AttemptHistory
) -> Decision:
    what = _what(status, signal, slurm)
    fruitless = 0
    if not _is_new(progress, history):
        is_from_outside = slurm.reason in _FROM_OUTSIDE or (slurm.preempting and not status.exit)
        fruitless = history.fruitless + (not is_from_outside)
    if progress.finished is not None:
        return Decision(action="finish", why=f"the run is over: it has said so after step {progress.finished}")
    if slurm.reason == "cancelled":
        return Decision(action="refuse", why=f"{what}; the same sbatch command continues", fruitless=fruitless)
    mistake = (status.exit if status.rank_exit is None else status.rank_exit) == USAGE and not status.of_node
    if mistake and progress.saved is None and signal is None and slurm.reason is None:
        why = f"{what}: a mistake in the flags or the data, which another attempt would not fix"
        return Decision(action="refuse", why=why, fruitless=fruitless)
    what = f"{what}, {_saved(progress, fruitless, history)}"
    # Of an attempt that Slurm has ended no rank has failed first: they were all ended.
    exclude = () if signal or slurm.reason else _exclude(status.bad_nodes, slurm, history)
    if slurm.requeued:
        return Decision(action="requeue", why=what, fruitless=fruitless)
    if fruitless > history.max_restarts:
        return Decision(action="refuse", why=what, fruitless=fruitless)
    if slurm.spares is not None and slurm.spares >= 0 and not signal and slurm.reason is None:
        return Decision(action="again", why=what, fruitless=fruitless, exclude=status.bad_nodes)
    if slurm.may_requeue:
        return Decision(action="requeue", why=what, fruitless=fruitless, exclude=exclude)
    if slurm.successor is not None:
        return Decision(action="chain", why=what, fruitless=fruitless, exclude=exclude)
    why = f"{what}; REQUEUE=no, and no job follows: the same sbatch command continues"
    return Decision(action="refuse", why=why, fruitless=fruitless)


def decide_start(history: AttemptHistory) -> Decision | None:
    """Whether an attempt may begin at all: Slurm itself may have brought back one too many. None if it may."""
    if history.fruitless <= history.max_restarts:
        return None
    why = f"{history.fruitless} attempts in a row without a new checkpoint, MAX_RESTARTS={history.max_restarts}"
    return Decision(action="refuse", why=why, fruitless=history.fruitless)


def choose_nodes(nodes: Sequence[str], wanted: int, failed: Collection[str]) -> tuple[str, ...]:
    """The nodes of a job that train; the others are spare ones.

    Args:
        nodes: that it has, in Slurm's order, which stays: the first one has number 0.
        wanted: how many train.
        failed: those that have failed are taken only if there are not enough others.
    """
    chosen = sorted(nodes, key=lambda node: node in failed)[:wanted]
    return tuple(node for node in nodes if node in chosen)


def _what(status: Status, signal: str | None, slurm: SlurmState) -> str:
    if slurm.reason == "cancelled":
        return "the job was cancelled"
    if slurm.reason is not None:
        return f"ended by Slurm ({slurm.reason})"
    if status.unchecked:
        named = "; ".join(f"{node.name}: {node.why}" for node in status.bad_nodes)
        return f"nodes failed their check: {named or status.error}"
    if status.exit:
        return f"failed with {status}" + (f" after {signal}" if signal else "")
    if signal is not None:
        return f"stopped by {signal}" + (" (preemption)" if slurm.preempting else "")
    return f"ended with {status}, and the run has not said that it is over"


def _is_new(progress: AttemptProgress, history: AttemptHistory) -> bool:
    return progress.saved is not None and (history.best is None or progress.saved > history.best)


def _saved(progress: AttemptProgress, fruitless: int, history: AttemptHistory) -> str:
    if _is_new(progress, history):
        return f"new checkpoint at step {progress.saved}"
    saved = "" if progress.saved is None else f" (step {progress.saved}, where one has come to {history.best})"
    if fruitless == history.fruitless:
        return f"no new checkpoint{saved}, which does not count"
    return f"attempt {fruitless} in a row without a new checkpoint{saved}, MAX_RESTARTS={history.max_restarts}"


def _exclude(nodes: tuple[BadNode, ...], slurm: SlurmState, history: AttemptHistory) -> tuple[BadNode, ...]:
    new = [node for node in nodes if node.name not in history.excluded]
    room = min(history.max_excluded - len(history.excluded), slurm.other_nodes)
    return tuple(new[: max(room, 0)])


#: The words that run a script or a module with the hooks.
_RUN = ("-m", "megaresume.run")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """The settings that every script has, and explains; as they were given."""

    run_dir: str
    data: str
    python: str
    procs_per_node: str
    max_restarts: str
    script: str
    train: tuple[str, ...]
    #: the flags given to the script.
    flags: tuple[str, ...]

    def check_numbers(self, names: Iterable[str]) -> None:
        """Raise UsageError if one of these settings is not a number."""
        for name in names:
            if not (value := getattr(self, name.lower())).isdecimal():
                raise UsageError(f"{name}={value} is not a number")

    def no_data(self, where: str = "") -> UsageError:
        """The data config is not there; ``where`` this is, in words."""
        return UsageError(
            f"there is no DATA={self.data}{where}", action="set DATA to your data.yaml, with its whole path"
        )

    def check_data(self, where: str = "") -> None:
        """Raise `no_data` if there is none."""
        if not Path(self.data).is_file():
            raise self.no_data(where)

    def no_script(self, where: str = "") -> UsageError:
        """The script of TRAIN is not there; ``where`` this is, in words."""
        return UsageError(
            f"there is no script {script_of(self.train)}{where}", action="give it in TRAIN with its whole path"
        )

    def check_script(self, where: str = "") -> None:
        """Raise `no_script` if TRAIN has one that is not there."""
        if (script := script_of(self.train)) and not Path(script).is_file():
            raise self.no_script(where)

    def check_python(self, where: str = "") -> None:
        """Raise UsageError if PYTHON is not on the PATH; ``where`` this is, in words."""
        if shutil.which(self.python) is None:
            action = "set PYTHON to the one of your environment, the whole path"
            raise UsageError(f"there is no PYTHON={self.python}{where}", action=action)

    def ranks_per_node(self, auto: Callable[[], str]) -> int:
        """PROCS_PER_NODE, which ``auto`` finds out if nobody gave it. Raises UsageError if it is not a number of
        ranks."""
        words = auto() if self.procs_per_node == "auto" else self.procs_per_node
        if not words.isdecimal() or int(words) < 1:
            raise UsageError(f"PROCS_PER_NODE={words} is not a number of ranks")
        return int(words)


class LaunchDriver:
    """One start of a script.

    Args:
        settings: of the script.
        run_dir: RUN_DIR.
    """

    def __init__(self, settings: LaunchSettings, run_dir: Path) -> None:
        self.run_dir, self.stop_file = run_dir, run_dir / "stop"
        checkpoints = str(run_dir / "checkpoints")
        ours = ["--save", checkpoints, "--load", checkpoints, "--exit-signal-handler"]
        ours += ["--megaresume-stop-file", str(self.stop_file), "--megaresume-elastic"]
        ours += ["--megaresume-log-samples", str(run_dir / "samples.jsonl")]
        #: the words after PYTHON.
        self.training = (*settings.train, *ours, *settings.flags)
        #: the first one that came.
        self.signal: str | None = None

    def say(self, words: str) -> None:
        """A line of the log."""
        raise NotImplementedError

    def say_refused(self, what: str, error: MegaresumeError) -> None:
        """Say that nothing is started, and what to do."""
        found = "" if error.found is None else f": {error.found}"
        self.say(f"{what}: {error.headline}{found}")
        if error.action:
            self.say(f"  action: {error.action}")

    def make_run_dir(self, directory: Path, action: str | None = None) -> None:
        """Make it, or a directory in it. Raises UsageError if it cannot be made."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"RUN_DIR={self.run_dir} cannot be created: {error.strerror}", action=action) from error

    def touch_stop_file(self) -> None:
        """Ask the run to stop by a file, for ranks that cannot be signalled, on other nodes, in containers. The run
        removes it."""
        try:
            self.stop_file.touch()
        except OSError as error:
            words = f"the stop file {self.stop_file} cannot be created: {error.strerror}"
            self.say(f"{words}; ranks that are still starting continue")


def script_of(training: Sequence[str]) -> str:
    """The script that a training command starts, also by ``-m megaresume.run``; "": none, or nobody can tell."""
    words = training[2:] if tuple(training[:2]) == _RUN else training
    return words[0] if words and not words[0].startswith("-") else ""


def modules_of(training: Sequence[str]) -> list[str]:
    """The modules that it starts by ``-m``, also by that of ``-m megaresume.run``."""
    words, found = training, []
    while tuple(words[:1]) == ("-m",) and len(words) > 1:
        found.append(words[1])
        words = words[2:] if tuple(words[:2]) == _RUN else ()
    return found


def count_gpus() -> int:
    """The GPUs that this process sees, as nvidia-smi lists them."""
    with suppress(OSError):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        return gpus_listed(done.stdout)
    return 0


def gpus_listed(text: str) -> int:
    """GPUs in what ``nvidia-smi -L`` prints."""
    return sum(line.startswith("GPU ") for line in text.splitlines())


FORMAT, VERSION = "megaresume.attempts", 1
#: flags that name a checkpoint root.
_FLAGS = ("--save", "--megaresume-stage-to")
#: flags that say at which checkpoint to begin.
_PINS = ("--ckpt-step",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """The attempts of a job, or of a chain of them."""

    #: the number of attempts in a row without a new checkpoint.
    fruitless: int = 0
    #: the furthest step that one of them has saved; None if none has saved.
    best: int | None = None
    #: nodes that are left out, and why.
    excluded: dict[str, str] = field(default_factory=dict)
    #: nodes that spare ones have replaced, and why.
    replaced: dict[str, str] = field(default_factory=dict)


def read_attempts(path: Path) -> Attempts:
    """Read what earlier attempts have left; a missing file: nothing. Raises SetupError if it cannot be read."""
    if not path.exists():
        return Attempts()
    try:
        return read_record(
            path, _attempts, what="the count of attempts", format_name=FORMAT, version=VERSION, error=StateError
        )
    except StateError as error:
        raise SetupError(
            "the count of attempts cannot be read, so an endless loop could not be noticed",
            found=f"{path}: {error.headline}",
            action="look at the directory; delete the file to count from 0 again",
        ) from error


def _attempts(fields: Mapping[str, Any]) -> Attempts:
    return from_members(Attempts, fields, fruitless=count, best=count, excluded=members, replaced=members)


def write_attempts(path: Path, attempts: Attempts) -> None:
    """Write it, durably. Raises SetupError if the disk refuses."""
    try:
        make_dir(path.parent)
        write_atomic(path, seal({"format": FORMAT, "version": VERSION} | asdict(attempts)))
    except CheckpointError as error:
        raise SetupError(
            "the count of attempts cannot be written, so an endless loop could not be noticed",
            found=f"{path}: {error.found}",
            expected="a RUN_DIR with free space, free inodes and quota",
            action="make room, or set RUN_DIR to another directory",
        ) from error


def checkpoint_roots(words: Sequence[str], directory: Path) -> tuple[Path, ...]:
    """The directories that a training command saves to: the last one given of each flag.

    Args:
        words: of the command; ``--save DIR`` and ``--save=DIR``, dashes or underscores.
        directory: that it is started in.
    """
    roots: dict[str, Path] = {}
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in _FLAGS and (equals or at + 1 < len(words)):
            place = value if equals else words[at + 1]
            if "://" not in place:  # of a store the ledger is not looked at: the local one has all its lines
                roots[flag] = directory / place
    return tuple(roots.values())


def without_pins(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """A training command without the flags that say at which checkpoint to begin; and those flags.

    They are for the first attempt: once one has saved, the next resumes from there.
    """
    kept: list[str] = []
    left_out: list[str] = []
    at = 0
    while at < len(words):
        flag, equals, _ = words[at].partition("=")
        size = 0 if flag.replace("_", "-") not in _PINS else 1 if equals else 2
        (left_out if size else kept).extend(words[at : at + max(size, 1)])
        at += max(size, 1)
    return tuple(kept), left_out


class Ledgers:
    """The ledgers of one attempt, from its beginning on.

    Args:
        roots: see `checkpoint_roots`.
        attempt: as its lines are signed; see `megaresume.checkpoint.records.ledger.ATTEMPT`. None if not known,
            all lines count.

    Raises:
        StateError: a ledger cannot be read.
    """

    def __init__(self, roots: Sequence[Path], attempt: str | None) -> None:
        self._attempt = attempt
        self._begin = {ledger_path(root): len(read_ledger(ledger_path(root)).entries) for root in roots}

    def progress(self, *, status: int | None = None) -> AttemptProgress:
        """The progress of the attempt so far.

        Args:
            status: exit status of the training; None if it still runs. A start that found nothing to train is an end
                only if it ended well: it may have had something to validate.
        """
        own = [entry for path, count in self._begin.items() for entry in self._own(path, count)]
        ends = [entry.iteration for entry in own if entry.kind == "finished"]
        if status == 0:
            ends += [e.iteration for e in own if e.kind == "start" and e.details.get(NOTHING_TO_TRAIN)]
        saved = [entry.iteration for entry in own if entry.kind == "checkpoint"]
        return AttemptProgress(finished=max(ends, default=None), saved=max(saved, default=None))

    def _own(self, path: Path, count: int) -> list[LedgerEntry]:
        entries = read_ledger(path).entries[count:]
        own = self._attempt
        return [entry for entry in entries if own is None or entry.details.get("attempt", own) == own]
