"""Old checkpoints make room: which ones may go, and how they go.

    a checkpoint is durable -> prune    newest K durable ones, every N-th, what a pointer names: kept
                                        the rest of the complete ones: renamed out of sight, then deleted in a thread

Nothing goes for a checkpoint that a power cut could still take. Only what a commit has made complete is ever deleted.
Damaged and half-written checkpoints are kept for whoever has to find out what happened, links and directories
with names of the user's own because somebody made them on purpose, and everything newer than the checkpoint just
committed because a run that went back has not reached it again. Data state, manifest and ledger line outlive the
weights: `trace` and `verify` need no weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megaresume.checkpoint.choosing.candidates import Candidate, examine, list_candidates, resolve_pointer
from megaresume.checkpoint.files import delete_soon, leftover_name
from megaresume.checkpoint.ledger import abandoned_checkpoints, read_ledger
from megaresume.checkpoint.lock import check_owned
from megaresume.checkpoint.paths import is_usual_tag, ledger_path
from megaresume.checkpoint.pointers import read_pointers
from megaresume.checkpoint.saving.copying import is_copied
from megaresume.checkpoint.step_file import StepFile
from megaresume.stream.errors import MegaresumeError, UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints stay. Those that either rule names; with neither rule, all.

    Args:
        keep_last: the newest so many durable ones.
        keep_every: those whose iteration this divides.

    Raises:
        UsageError: a number below 1.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep-last", self.keep_last), ("keep-every", self.keep_every)):
            if value is not None and value < 1:
                raise UsageError(
                    f"--megaresume-{name} must be at least 1",
                    found=value,
                    expected="checkpoints" if name == "keep-last" else "iterations",
                    action=f"leave out --megaresume-{name} to keep all checkpoints",
                )

    def __bool__(self) -> bool:
        return self.keep_last is not None or self.keep_every is not None


#: delete nothing.
KEEP_ALL = Retention()


def prune(
    root: Path,
    retention: Retention,
    committed: StepFile,
    *,
    copied_to: Path | None = None,
    copies_of: Path | None = None,
) -> tuple[str, ...]:
    """Delete what a policy does not keep. On rank 0, when the checkpoint ``committed`` is durable.

    A directory disappears in one rename and is deleted by a thread, which the interpreter waits for at its end; what a
    kill leaves of it has the name of a temporary file, and the next start clears it away.

    Args:
        root: the checkpoint root.
        retention: the policy. ``keep_every`` alone keeps the newest one besides.
        committed: the checkpoint that is durable now.
        copied_to: only what has a complete copy there may go; None: no matter.
        copies_of: what is still there stays; None: no matter.

    Returns:
        the tags that are gone, newest first.

    Never raises: a checkpoint that cannot be deleted is named in the log. The training does not depend on it.
    """
    if not retention:
        return ()
    gone: list[str] = []
    doomed: list[Path] = []
    try:
        check_owned(root)
        for candidate in _superfluous(root, retention, committed):
            if copied_to is not None and not is_copied(root, copied_to, candidate.iteration, candidate.tag):
                continue
            if copies_of is not None and (copies_of / candidate.tag).is_dir():
                continue
            place = root / candidate.tag
            away = place.with_name(leftover_name(candidate.tag))
            try:
                os.rename(place, away)
            except OSError as error:
                log.warning("megaresume: cannot delete the old checkpoint %s: %s", place, error)
                continue
            gone.append(candidate.tag)
            doomed.append(away)
    except (MegaresumeError, OSError) as error:
        log.warning("megaresume: old checkpoints are kept: %s", error)
    delete_soon(doomed)
    return tuple(gone)


def _superfluous(root: Path, retention: Retention, committed: StepFile) -> Iterator[Candidate]:
    """What no rule keeps, newest first."""
    candidates = list_candidates(root)
    named = {resolve_pointer(pointer, candidates) for pointer in read_pointers(root)}
    # What a run that went back has left behind is no fallback of its present: it must not push one out.
    given_up = abandoned_checkpoints(read_ledger(ledger_path(root)).entries)
    durable = 0
    for candidate in candidates:
        iteration, tag = candidate.iteration, candidate.tag
        if not candidate.has_dir or iteration is None or iteration > committed.iteration:
            continue
        # In flight (another save's finalizer), of the user's own making, or never committed.
        if "saving" in candidate.records or not candidate.is_committed or not is_usual_tag(tag, iteration):
            continue
        every = retention.keep_every is not None and iteration % retention.keep_every == 0
        is_enough = durable >= (retention.keep_last or 1)
        if (every or candidate in named or os.path.islink(root / tag)) and is_enough:
            continue
        examined = examine(root, candidate, run=committed.run)
        if examined.status != "complete" or examined.manifest is None:
            continue
        durable += examined.manifest.durable and (iteration, tag) not in given_up
        if is_enough and not every and candidate not in named:
            yield candidate
