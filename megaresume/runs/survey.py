"""Everything that can be said about a checkpoint root, however damaged: what `megaresume inspect` prints."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from megaresume.checkpoint.atomic import is_leftover
from megaresume.checkpoint.candidates import Candidate, Examined, resolve_pointer
from megaresume.checkpoint.choose import Choice, Search
from megaresume.checkpoint.commit import run_of
from megaresume.checkpoint.layout import records_dir
from megaresume.checkpoint.ledger import LedgerReading
from megaresume.checkpoint.lock import Holder, holder_of
from megaresume.checkpoint.manifest import Progress
from megaresume.checkpoint.pointers import Pointer
from megaresume.checkpoint.sealed import NewerFormatError
from megaresume.stream.errors import MegaresumeError, StateError

__all__ = ["Survey", "survey"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """A checkpoint root, looked at from end to end."""

    root: Path
    pointers: tuple[Pointer, Pointer]
    #: newest first, without pruned ones; with a tag, only that one.
    checkpoints: tuple[Examined, ...]
    #: older ones that were not looked at, because of the limit.
    num_older: int
    #: checkpoints whose weights are gone while their records are kept.
    num_pruned: int
    #: what each of the pointers names; None: nothing that is there.
    named: tuple[Examined | None, Examined | None]
    ledger: LedgerReading
    #: who writes here, or did last; None: nobody ever.
    holder: Holder | None
    #: what a resume would load; None: nothing, or an error.
    choice: Choice | None
    #: why nothing can be loaded.
    error: MegaresumeError | None
    #: temporary files of killed writers; harmless.
    leftovers: tuple[str, ...]
    #: sentences, besides those of the choice.
    notes: tuple[str, ...]

    @property
    def resumable(self) -> bool:
        """Whether a resume would find weights *and* their data state."""
        return self.choice is not None and self.choice.state is not None


def survey(
    root: Path,
    *,
    tag: str | None = None,
    limit: int | None = None,
    checksums: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Look at a whole root. Reads only.

    Args:
        root: the checkpoint root.
        tag: what a resume is asked to load; None: the newest complete one. Only this one is examined then.
        limit: how many checkpoints to look at, from the newest on, besides the chosen one; None: all.
        checksums: read every file that has a checksum in its manifest.
        threads: for checksums, at the same time; None: one a core.
        progress: called with the bytes just read, from several threads.

    Raises:
        CheckpointError: the directory cannot be listed at all.
    """
    notes: list[str] = []
    run, ledger = None, LedgerReading()
    with contextlib.suppress(StateError):
        run = run_of(root)
    search = Search(root, run, tag, checksums, threads, progress)
    try:
        ledger = search.ledger
    except StateError as problem:
        notes.append(str(problem))
    choice, error = None, None
    try:
        choice = search.newest() if tag is None else search.exactly_tag(tag, None)
    except MegaresumeError as problem:
        error = problem
    matching = [c for c in search.candidates if tag in (None, c.tag)]
    present = [c for c in matching if c.has_dir or "manifest" not in c.records]
    shown = present[:limit]
    if choice is not None:
        shown += [c for c in present[len(shown) :] if c.tag == choice.tag]
    checkpoints = tuple(_examine(search, candidate) for candidate in shown)
    if checksums:
        unsummed = [e.candidate.tag for e in checkpoints if e.manifest is not None and not e.manifest.has_checksums]
        if unsummed:
            some = ", ".join(unsummed[:5]) + (f", and {len(unsummed) - 5} more" if len(unsummed) > 5 else "")
            notes.append(f"saved without checksums, so that only sizes could be compared: {some}")
    resolved = [resolve_pointer(pointer, search.candidates) for pointer in search.pointers]
    latest, tracker = (None if c is None else _examine(search, c) for c in resolved)
    return Survey(
        root=root,
        pointers=search.pointers,
        checkpoints=checkpoints,
        num_older=len(present) - len(shown),
        num_pruned=len(matching) - len(present),
        named=(latest, tracker),
        ledger=ledger,
        holder=holder_of(root),
        choice=choice,
        error=error,
        leftovers=_leftovers(root),
        notes=tuple(notes),
    )


def _examine(search: Search, candidate: Candidate) -> Examined:
    try:
        return search.examine(candidate)
    except NewerFormatError as error:
        return Examined(candidate=candidate, status="newer", reasons=(f"{error.headline} ({error.found})",))


def _leftovers(root: Path) -> tuple[str, ...]:
    found: list[str] = []
    for directory in (root, records_dir(root)):
        if directory.is_dir():
            found += [os.path.relpath(directory / name, root) for name in os.listdir(directory) if is_leftover(name)]
    return tuple(sorted(found))
