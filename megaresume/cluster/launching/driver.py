"""What the drivers of all launch scripts have in common.

    Settings, Driver   the training command, how they say what they do
    Attempts           what an attempt leaves for the next
    Ledgers            what it has written to the ledger of its checkpoints, as a `AttemptProgress`

The count of attempts is written, and is on the disk, before anything is launched: an attempt that nobody sees end is
counted, and a run directory that takes no more bytes refuses the launch instead of beginning forever "for the first
time".

Of a ledger the lines after those that were there when the attempt began count, unless another attempt signed them: a
job that has lost the directory to another one does not take its checkpoints for its own.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choose import NOTHING_TO_TRAIN
from megaresume.checkpoint.ledger import LedgerEntry, read_ledger
from megaresume.checkpoint.records import count, from_members, ledger_path, members, read_record, seal
from megaresume.cluster.launching.decide import AttemptProgress
from megaresume.files import make_dir, write_atomic
from megaresume.stream.errors import CheckpointError, MegaresumeError, SetupError, StateError, UsageError

#: what runs a script or a module with the hooks.
_RUN = ("-m", "megaresume.run")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Those that every script has, and explains; as they were given."""

    run_dir: str
    data: str
    python: str
    procs_per_node: str
    max_restarts: str
    script: str
    train: tuple[str, ...]
    #: given to the script.
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
        #: what follows PYTHON.
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
        """For ranks that do not listen yet, on other nodes, in containers. Removed by the run when it has saved."""
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

    #: in a row without a new checkpoint.
    fruitless: int = 0
    #: the furthest step that one of them has saved; None if none has saved.
    best: int | None = None
    #: nodes that are left out, and why.
    excluded: dict[str, str] = field(default_factory=dict)
    #: nodes that spare ones have replaced, and why.
    replaced: dict[str, str] = field(default_factory=dict)


def read_attempts(path: Path) -> Attempts:
    """What earlier attempts have left; a missing file: nothing. Raises SetupError if it cannot be read."""
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
    """Where a training command saves to: the last one given of each flag.

    Args:
        words: of the command; ``--save DIR`` and ``--save=DIR``, dashes or underscores.
        directory: that it is started in.
    """
    roots: dict[str, Path] = {}
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in _FLAGS and (equals or at + 1 < len(words)):
            roots[flag] = directory / (value if equals else words[at + 1])
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
        attempt: as its lines are signed; see `megaresume.checkpoint.ledger.ATTEMPT`. None if not known, all lines
            count.

    Raises:
        StateError: a ledger cannot be read.
    """

    def __init__(self, roots: Sequence[Path], attempt: str | None) -> None:
        self._attempt = attempt
        self._begin = {ledger_path(root): len(read_ledger(ledger_path(root)).entries) for root in roots}

    def progress(self, *, status: int | None = None) -> AttemptProgress:
        """What the attempt has done so far.

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
