"""State that an attempt leaves for the next: `Attempts` in a file; and `Ledgers`, which reads what the attempt wrote
to the ledger of its checkpoints, as `AttemptProgress`.

The count of attempts is on disk before anything is launched: an attempt whose end nobody sees is counted too, and a
full disk refuses the launch, instead of each attempt seeming the first.

In a ledger, only lines written since the attempt began count, unless another attempt signed them: a job that has lost
the directory to another one must not take that one's checkpoints for its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaresume.checkpoint.records.ledger import LedgerEntry, read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.checkpoint.records.sealed import count, from_members, members, read_record, seal
from megaresume.checkpoint.starts import NOTHING_TO_TRAIN
from megaresume.cluster.drivers.decide import AttemptProgress
from megaresume.files import make_dir, write_atomic
from megaresume.stream.errors import CheckpointError, SetupError, StateError

FORMAT, VERSION = "megaresume.attempts", 1
#: flags that name a checkpoint root.
_FLAGS = ("--save", "--megaresume-stage-to")
#: flags that set the checkpoint to begin with.
_PINS = ("--ckpt-step",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """The attempts of a job, or of a chain of them."""

    #: consecutive attempts without a new checkpoint.
    fruitless: int = 0
    #: the furthest step that any of them saved; None if none has.
    best: int | None = None
    #: nodes that are left out -> the reason.
    excluded: dict[str, str] = field(default_factory=dict)
    #: nodes that were replaced by spare ones -> the reason.
    replaced: dict[str, str] = field(default_factory=dict)


def read_attempts(path: Path) -> Attempts:
    """The state left by earlier attempts; empty without a file. Raises SetupError if it cannot be read."""
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
    """Write it durably. Raises SetupError if that fails."""
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
    """The directories that a training command saves to: for each flag, the last one given.

    Args:
        words: of the command; ``--save DIR`` and ``--save=DIR``, dashes or underscores.
        directory: the one that it is started in.
    """
    roots: dict[str, Path] = {}
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in _FLAGS and (equals or at + 1 < len(words)):
            place = value if equals else words[at + 1]
            if "://" not in place:  # a store's ledger is not read: the local one has all its lines
                roots[flag] = directory / place
    return tuple(roots.values())


def without_pins(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """A training command without the flags that set the checkpoint to begin with; and those flags.

    They are meant for the first attempt: once one has saved, the next resumes from there.
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
        attempt: the signature of its lines, see `megaresume.checkpoint.records.ledger.ATTEMPT`; None if unknown: all
            lines count.

    Raises:
        StateError: a ledger cannot be read.
    """

    def __init__(self, roots: Sequence[Path], attempt: str | None) -> None:
        self._attempt = attempt
        self._begin = {ledger_path(root): len(read_ledger(ledger_path(root)).entries) for root in roots}

    def progress(self, *, status: int | None = None) -> AttemptProgress:
        """The progress of the attempt so far.

        Args:
            status: exit status of the training; None if it still runs. A start that found nothing to train counts as an
                end only with status 0: it may have had something to validate.
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
