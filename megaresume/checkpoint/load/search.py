"""`Search`: the checkpoints of one root, each examined at most once, and the rules for choosing one.

In this order, unless a tag or an iteration was requested (then exactly that one, or an error):

1. A complete checkpoint newer than the pointers *whose marker still exists*: the save was killed between manifest and
   pointers. Nothing of it is missing, and loading an older one would repeat samples.
2. What the pointers name, if they agree. Also if there are newer complete checkpoints with finished commits: then the
   pointers were moved back on purpose. Also if it was written without megaresume: then the choice has no state, and
   the caller decides.
3. Walking back: the newest complete one older than that, without abandoned branches (a run that restarted from 10 and
   saved 15 does not fall back to the 12 of the attempt before).
4. Anything else that is complete: abandoned branches, and checkpoints beyond the pointers.
5. The newest one that was written without megaresume. If one with a state is loaded, each newer one without is named:
   it comes from a start in which megaresume was forgotten.

If the pointers disagree, they name nothing: the newest complete one is loaded, with a note.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from megaresume.checkpoint.records.branches import abandoned_checkpoints
from megaresume.checkpoint.records.candidates import Candidate, Examined, examine, list_candidates, resolve_pointer
from megaresume.checkpoint.records.envelope import DataState
from megaresume.checkpoint.records.ledger import LedgerReading, read_ledger
from megaresume.checkpoint.records.manifest import Manifest, directories_of_models
from megaresume.checkpoint.records.names import ledger_path, step_path
from megaresume.checkpoint.records.pointers import Pointer, read_pointers
from megaresume.checkpoint.records.staging_note import read_note
from megaresume.checkpoint.records.step_file import StepFile, read_step_file
from megaresume.stream.errors import CheckpointError, MegaresumeError, StateError, listed
from megaresume.stream.progress import Progress

_UNIVERSAL = "_universal"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A checkpoint that was skipped."""

    tag: str
    iteration: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.tag}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The checkpoint to load."""

    #: the checkpoint root.
    load_dir: Path
    tag: str
    #: None for an unmanaged checkpoint whose name has no iteration.
    iteration: int | None
    #: None if written without megaresume: no data state. The caller decides, and must not start over silently.
    record: StepFile | None
    #: None if there is no manifest: completeness is unknown.
    manifest: Manifest | None
    #: newer ones that could not be loaded.
    rejected: tuple[Rejected, ...] = ()
    #: notes for the user: sentences, logged on rank 0.
    notes: tuple[str, ...] = ()

    @property
    def tag_dir(self) -> Path:
        """The tag directory."""
        return self.load_dir / self.tag

    @property
    def state(self) -> DataState | None:
        """The data state."""
        return None if self.record is None else self.record.state

    @property
    def digest(self) -> str | None:
        """Digest of the data state, 16 hex digits."""
        return None if self.record is None else self.record.state.digest

    def __str__(self) -> str:
        state = "without a data state" if self.state is None else f"{self.state.samples} samples, digest {self.digest}"
        return f"{self.tag}, {state}"

    def to_dict(self) -> dict[str, Any]:
        """The choice as plain JSON."""
        return {
            "tag": self.tag,
            "iteration": self.iteration,
            "digest": self.digest,
            "samples": None if self.record is None else self.record.state.samples,
            "save_id": None if self.record is None else self.record.save_id,
        }


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """Instead of a `Choice`: the framework decides what to load. Weights from elsewhere, or a checkpoint without a
    manifest. It says nothing about the directory, which may still have checkpoints.
    """


class Search:
    """One search of a root, which remembers what was examined and skipped. Used by `choose` and `Run`."""

    def __init__(
        self,
        root: Path,
        run: str | None,
        tag: str | None,
        *,
        checksums: bool,
        progress: Progress | None,
        damaged: Mapping[Path, str] | None = None,
    ) -> None:
        self.root = root
        self.damaged = damaged or {}
        self.checksums, self.progress = checksums, progress
        self.pointers = read_pointers(root)
        named = tuple(name for name in (tag, *(p.tag for p in self.pointers)) if name)
        self.candidates = list_candidates(root, tags=named)
        self.run = run
        self.examined: dict[Candidate, Examined] = {}
        self.notes: list[str] = []

    @cached_property
    def ledger(self) -> LedgerReading:
        return read_ledger(ledger_path(self.root))

    def examine(self, candidate: Candidate) -> Examined:
        if candidate not in self.examined and (reason := self.damaged.get(self.root / candidate.tag)) is not None:
            self.examined[candidate] = Examined(candidate=candidate, status="damaged", reasons=(reason,))
        if candidate not in self.examined:
            self.examined[candidate] = examine(
                self.root, candidate, run=self.run, checksums=self.checksums, progress=self.progress
            )
        return self.examined[candidate]

    def choice(self, found: Examined) -> Choice:
        # Newest first; pruned ones are only mentioned if nothing else explains the choice.
        passed = sorted(
            (e for e in self.examined.values() if e is not found and e.status not in ("complete", "pruned")),
            key=lambda e: -e.candidate.order,
        )
        # An unsynced one only if requested.
        managed = found.status in ("complete", "unsynced")
        if managed:
            self._note_left(
                [
                    e.candidate.tag
                    for e in passed
                    if e.status == "unmanaged" and e.candidate.order > found.candidate.order
                ]
            )
        return Choice(
            load_dir=self.root,
            tag=found.candidate.tag,
            iteration=found.candidate.iteration,
            record=found.record if managed else None,
            manifest=found.manifest if managed else None,
            rejected=tuple(
                Rejected(tag=e.candidate.tag, iteration=e.candidate.iteration, reason=e.reason) for e in passed
            ),
            notes=tuple(self.notes),
        )

    def exactly_tag(self, tag: str, iteration: int | None = None) -> Choice:
        matching = [c for c in self.candidates if c.tag == tag and iteration in (None, c.iteration)]
        if tag.endswith(_UNIVERSAL) and matching and not matching[0].records:
            return self._universal(tag)
        if not any(c.has_dir for c in matching):
            self._not_there(f"there is no checkpoint {tag}" + ("" if iteration is None else f" of {iteration}"))
        return self._exactly(matching, f"the checkpoint {tag}")

    def exactly_iteration(self, iteration: int) -> Choice:
        matching = [c for c in self.candidates if c.iteration == iteration]
        if not any(c.has_dir for c in matching):
            self._not_there(f"there is no checkpoint of iteration {iteration}")
        return self._exactly(matching, f"the checkpoint of iteration {iteration}")

    def _exactly(self, matching: list[Candidate], what: str) -> Choice:
        found = [self.examine(c) for c in matching]
        for status in ("complete", "unmanaged", "unsynced"):
            for one in found:
                if one.status == status:
                    if status != "complete":
                        self.notes.append(f"{one.candidate.tag}: {one.reason}")
                    return self.choice(one)
        raise CheckpointError(
            f"{what} cannot be loaded",
            found="; ".join(f"{one.candidate.tag} is {one.status}: {one.reason}" for one in found),
            expected="a complete checkpoint",
            action="ask for no particular one: then the newest complete one is loaded, which megaresume latest "
            f"{self.root} names",
        )

    def _universal(self, tag: str) -> Choice:
        base = tag.removesuffix(_UNIVERSAL)
        source = next((c for c in self.candidates if c.tag == base and "state" in c.records), None)
        if source is None or source.iteration is None:
            raise CheckpointError(
                f"the universal checkpoint {tag} has no data state",
                found=f"no data state of {base} in {self.root}",
                expected=f"the records of the checkpoint {base}, from which it was converted",
                action=f"copy them here from the directory that {base} was saved to, or load another checkpoint",
            )
        path = step_path(self.root, source.iteration, base)
        record = read_step_file(path, iteration=source.iteration, tag=base, run=self.run)
        self.notes.append(f"{tag} takes the data state of {base}; its own files were not checked")
        return Choice(
            load_dir=self.root,
            tag=tag,
            iteration=source.iteration,
            record=record,
            manifest=None,
            notes=tuple(self.notes),
        )

    def _not_there(self, headline: str) -> NoReturn:
        tags = [c.tag for c in self.candidates if c.has_dir]
        raise CheckpointError(
            headline,
            found=f"{self.root} holds " + (listed(tags, 10) or "none"),
            expected="a tag directory of that name or iteration",
            cause="it was pruned or never saved, or the directory is another one",
            action=f"megaresume inspect {self.root} lists them",
        )

    def newest(self) -> Choice | None:
        if not any(c.has_dir for c in self.candidates):
            self._check_empty()
            return None
        if self.ledger.run is None:
            self._check_one_run()
        self.notes += [str(problem) for problem in self.ledger.problems if problem.kind != "cut"]
        named = self.named_by_pointers()
        abandoned = abandoned_checkpoints(self.ledger.entries)

        def given_up(c: Candidate) -> bool:
            return c.iteration is not None and (c.iteration, c.tag) in abandoned and c is not named

        newer = [c for c in self.candidates if named is not None and c.order > named.order]
        at_or_below = [c for c in self.candidates if c not in newer and c is not named]

        if (found := self._first_complete(c for c in newer if "saving" in c.records)) is not None:
            self.notes.append(
                f"{found.candidate.tag} is complete, but its save was killed before the pointers were moved to it"
            )
            return self.choice(found)
        if named is not None:
            found = self.examine(named)
            if found.status in ("complete", "unmanaged"):
                self._note_newer(named, newer)
                if found.status == "unmanaged":
                    self.notes.append(f"{named.tag}: {found.reason}")
                else:
                    self._examine_unmanaged(newer)
                return self.choice(found)
        if (found := self._first_complete(c for c in at_or_below if not given_up(c))) is not None:
            return self.choice(found)
        if (found := self._first_complete(c for c in self.candidates if c is not named)) is not None:
            why = "it is newer than the pointers" if found.candidate in newer else "it is on a branch that was given up"
            self.notes.append(f"{found.candidate.tag} is taken although {why}: nothing else is complete")
            return self.choice(found)
        for candidate in self.candidates:
            found = self.examine(candidate)
            if found.status == "unmanaged":
                self.notes.append(f"{candidate.tag}: {found.reason}")
                return self.choice(found)
        if self._none_was_committed():
            log.warning("%s: the first save of the run was killed; nothing was ever committed", self.root)
            return None
        return self._none_complete()

    def _none_was_committed(self) -> bool:
        """Whether the root only has unfinished saves of a run that never finished one."""
        began = all(c.unfinished for c in self.candidates)
        return (
            began and not any(entry.kind == "checkpoint" for entry in self.ledger.entries) and not self.ledger.problems
        )

    def _check_empty(self) -> None:
        for pointer in self.pointers:
            if pointer.status != "absent":
                raise CheckpointError(
                    "there are pointers but no checkpoint",
                    found=f"{self.root / pointer.name}: {pointer.problem or repr(pointer.text)}",
                    expected="the tag directory that it names",
                    cause="the checkpoints were deleted or moved, or lie on a filesystem that is not mounted here",
                    action="restore the tag directories; to start over, save into an empty directory",
                )
        recorded = [c.tag for c in self.candidates if c.is_committed]
        recorded += [str(entry.tag) for entry in reversed(self.ledger.entries) if entry.kind == "checkpoint"]
        if recorded:
            raise CheckpointError(
                "there are records of checkpoints but no checkpoint",
                found=f"{self.root}: records of {', '.join(dict.fromkeys(recorded[:10]))}",
                expected="their tag directories",
                cause="the checkpoints were deleted or moved",
                action="restore the tag directories; to start over, save into an empty directory",
            )
        if named := directories_of_models(self.root):
            raise CheckpointError(
                "there are model files, but nothing says whether they are a checkpoint",
                found=f"{self.root}: {', '.join(named[:10])}",
                expected="pointers, or records in its directory megaresume",
                cause="the directory was copied without its megaresume and latest, or holds the checkpoints of another "
                "program",
                action="copy them as well, or load one by its tag; to start over, save into an empty directory",
            )

    def _check_one_run(self) -> None:
        """Refuse a root without a ledger whose records come from two runs."""
        runs: dict[str, str] = {}
        for candidate in self.candidates:
            if candidate.has_dir and candidate.iteration is not None and {"state", "manifest"} <= candidate.records:
                path = step_path(self.root, candidate.iteration, candidate.tag)
                with contextlib.suppress(StateError):  # skipped, with the reason
                    runs.setdefault(read_step_file(path).run, candidate.tag)
        if len(runs) > 1:
            raise CheckpointError(
                "there are checkpoints of several runs, and no ledger says which run this directory belongs to",
                found=f"{self.root}: " + ", ".join(f"{tag} of run {run}" for run, tag in runs.items()),
                expected="those of one run, or its ledger megaresume/ledger.jsonl",
                cause="checkpoints were copied here from another run, and the ledger was deleted",
                action="restore the ledger; or move away what does not belong here, with its records",
            )

    def named_by_pointers(self) -> Candidate | None:
        """The checkpoint named by the pointers; None if it was not committed, or they disagree."""
        named: list[tuple[Pointer, Candidate]] = []
        for pointer in self.pointers:
            candidate = resolve_pointer(pointer, self.candidates)
            if candidate is not None and candidate.unfinished:
                # DeepSpeed moves its own before the save is finished: that does not show an intention.
                self.notes.append(f"{pointer.name} names {candidate.tag}, whose save did not end")
            elif candidate is not None:
                named.append((pointer, candidate))
            elif pointer.problem is not None:
                self.notes.append(pointer.problem)
        # Two directories of one step agree: the tracker only has the step.
        if len({candidate.order for _, candidate in named}) > 1:
            says = " and ".join(f"{pointer.name} names {candidate.tag}" for pointer, candidate in named)
            self.notes.append(
                f"the pointers disagree: {says}. The newest complete checkpoint is taken; to go back to an older "
                "one, ask for its tag or iteration, or set both pointers"
            )
            return None
        return named[0][1] if named else None

    def _first_complete(self, candidates: Iterable[Candidate]) -> Examined | None:
        for candidate in candidates:
            if candidate.has_dir:
                found = self.examine(candidate)
                if found.status == "complete":
                    return found
        return None

    def _note_newer(self, named: Candidate, newer: list[Candidate]) -> None:
        beyond = [c.tag for c in newer if c.has_dir and c.is_committed and "saving" not in c.records]
        if beyond:
            self.notes.append(
                f"the pointers name {named.tag}, although {', '.join(beyond[:5])} "
                f"{'is' if len(beyond) == 1 else 'are'} newer: the pointers are followed"
            )

    def _examine_unmanaged(self, newer: list[Candidate]) -> None:
        """Skip, with a note, checkpoints saved since without megaresume: trainers without pointers of their own, such
        as Hugging Face's, left ours where they were.
        """
        for candidate in newer:
            if not candidate.records:
                self.examine(candidate)

    def _note_left(self, tags: list[str]) -> None:
        if tags:
            self.notes.append(
                f"what a start without megaresume has trained is not taken ({listed(tags, 5)}), and saves of "
                "the same steps replace it: move it elsewhere to keep it"
            )

    def _none_complete(self) -> NoReturn:
        there = [e for e in self.examined.values() if e.candidate.has_dir]
        listed = [f"{e.candidate.tag} is {e.status}: {e.reason}" for e in there]
        found = "".join(f"\n    {line}" for line in [*self.notes, *listed])
        if any(e.status == "part" for e in there):
            raise CheckpointError(
                f"none of the {len(listed)} checkpoints in {self.root} is complete",
                found=found,
                expected="at least one complete checkpoint",
                cause="every node saved its part to a disk of its own, and this start reads the one disk",
                action=f"start with stage_to={self._url()} (--megaresume-stage-to): the newest checkpoint there is "
                "taken; one that is not there yet needs all nodes that saved it; to start over, empty this directory "
                "on every node",
            )
        raise CheckpointError(
            f"none of the {len(listed)} checkpoints in {self.root} is complete",
            found=found,
            expected="at least one complete checkpoint",
            cause="the first save was killed, or the files were damaged afterwards",
            action="restore a checkpoint from a copy; to start over, save into an empty directory",
        )

    def _url(self) -> str:
        """Where the parts here were copied to."""
        with contextlib.suppress(MegaresumeError):
            return repr(read_note(self.root)[0])
        return "the run's URL"
