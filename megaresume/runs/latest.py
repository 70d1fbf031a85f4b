"""Chooses the newest complete checkpoint of a directory, whichever program wrote it.

    recognise        which layout is it?                  by names of directories and pointers
      |
    our records      `choose`: exactly what a resume under megaresume takes
      |   none, or nothing complete by them
    pointer          the one that it names, then older ones. If the pointer is moved last, newer ones were never
      |              finished; those newer than DeepSpeed's ``latest`` are taken only if nothing else is complete
    files            each checkpoint is checked against its layout (`Layout.look`)

Reads only, and never unpickles.

``megaresume latest DIR``: the path of the newest complete checkpoint, alone on standard output, for launch scripts.

The reasons for skipping newer ones go to standard error. Neither torch nor numpy is imported, nothing is unpickled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from megaresume.checkpoint.load.foreign import Layout, Look, subdirectories
from megaresume.checkpoint.load.foreign_layouts import DEEPSPEED, HUGGING_FACE, LAYOUTS, MEGATRON, RELEASE
from megaresume.checkpoint.load.search import Rejected
from megaresume.checkpoint.records.candidates import Candidate
from megaresume.checkpoint.records.names import LATEST, TRACKER, records_dir
from megaresume.files import read_error
from megaresume.render import write_bytes
from megaresume.runs.answer import Answer, live, plain, told
from megaresume.runs.directory import Run
from megaresume.stream.errors import CheckpointError, MegaresumeError, UsageError, listed, visible

#: how many checkpoints an error lists, each with its reason.
_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Newest(Answer):
    """The newest complete checkpoint of a directory, and those passed over."""

    root: Path = live()
    whose: Layout = live()
    #: the checkpoint directory; None if there is no checkpoint at all.
    path: Path | None
    iteration: int | None = None
    #: whether a manifest of megaresume's says that it is complete, or its files alone.
    has_manifest: bool = live(default=False)
    #: newer ones that were not taken.
    passed_over: tuple[Rejected, ...] = ()
    #: notes for people, in sentences.
    notes: tuple[str, ...] = ()
    #: why there is none.
    error: str | None = None

    @told
    def layout(self) -> str:
        """The layout with a name, as the command line gives it."""
        return self.whose.name

    @told
    def tag(self) -> str | None:
        """The name of the checkpoint's directory."""
        return None if self.path is None else self.path.name

    @told
    def by(self) -> str:
        """The rule by which the checkpoint is complete."""
        return "manifest" if self.has_manifest else "files"


def recognise(root: Path) -> Layout | None:
    """Whose checkpoints these are, by names alone; None if there are none.

    Raises:
        UsageError: checkpoints of several programs, or one checkpoint instead of a directory of them.
        CheckpointError: the directory cannot be listed.
    """
    names = _subdirectories(root)
    found = [layout for layout in LAYOUTS.values() if any(layout.number(name) is not None for name in names)]
    if not found and _others(root, DEEPSPEED):
        found = [DEEPSPEED]
    if not found and RELEASE in names:
        found = [MEGATRON]
    if found in ([MEGATRON, DEEPSPEED], [DEEPSPEED]) and (root / "trainer_state.json").exists():
        _one_checkpoint(root, HUGGING_FACE)
    if not found:
        for layout in LAYOUTS.values():
            if layout.number(root.name) is not None and root.is_dir() and any(root.iterdir()):
                _one_checkpoint(root, layout)
        if (root / LATEST).exists():
            return DEEPSPEED
        return MEGATRON if (root / TRACKER).exists() else None
    if len(found) > 1:
        raise UsageError(
            "the directory holds checkpoints of several programs",
            found=f"{root}: {', '.join(layout.title for layout in found)}",
            expected="checkpoints of one",
            action="--layout " + " or --layout ".join(layout.name for layout in found),
        )
    return found[0]


def _one_checkpoint(root: Path, layout: Layout) -> None:
    raise UsageError(
        "this is one checkpoint, not a directory of checkpoints",
        found=f"{root} ({layout.title})",
        expected=f"the directory that holds it: {root.parent}",
        action=f"megaresume latest {root.parent}",
    )


def _subdirectories(root: Path) -> list[str]:
    try:
        return subdirectories(root)
    except OSError as error:
        raise read_error(root, error) from error


def _others(root: Path, layout: Layout) -> list[str]:
    try:
        return layout.others(root)
    except OSError as error:
        raise CheckpointError.unreadable(
            error.filename or root, error, "readable directories", action=f"check permissions below {root}"
        ) from error


def find_newest(run: Run, layout: Layout | None = None) -> Newest | None:
    """The newest complete checkpoint of a directory.

    Args:
        run: the directory that contains the checkpoints.
        layout: of `LAYOUTS`; None: recognise it.

    Returns:
        None, or ``path`` None, if there is no checkpoint at all: an empty directory, or (by the records of megaresume)
        only a first save that a kill cut short.

    Raises:
        CheckpointError: there are checkpoints, or a pointer, and none is complete.
        UsageError: see `recognise`.
        StateError: a record was written by a newer megaresume.
    """
    layout = layout or recognise(run.root)
    return None if layout is None else _Walk(run, layout).find()


def look_at(root: Path, layout: Layout, name: str) -> Look:
    """Compare a checkpoint directory with its layout; a file that cannot be read counts as a problem."""
    try:
        return layout.look(root / name, layout.number(name))
    except OSError as error:
        return Look(problems=(f"it cannot be read: {error.strerror or error}",))


def named_by(run: Run, layout: Layout, names: list[str]) -> tuple[str | None, int | None, str | None]:
    """Read the pointer of a layout: (directory that is there, its iteration, what is wrong with the pointer)."""
    if layout.pointer is None:
        return None, None, None
    pointer = run.pointers[layout.pointer != LATEST]
    if pointer.status in ("absent", "empty", "garbled", "unreadable"):
        return None, None, pointer.problem or f"there is no {pointer.name}"
    if pointer.text == RELEASE and layout is MEGATRON:
        return (RELEASE, None, None) if RELEASE in names else (None, None, pointer.problem)
    for name in names:
        if name == pointer.tag or (pointer.name == TRACKER and layout.number(name) == pointer.iteration is not None):
            return name, pointer.iteration if pointer.iteration is not None else layout.number(name), None
    number = pointer.iteration
    return None, number, f"{pointer.name} names {pointer.text!r}, which is not there"


class _Walk:
    def __init__(self, run: Run, layout: Layout) -> None:
        self.run, self.root, self.layout = run, run.root, layout
        names = [name for name in _subdirectories(self.root) if layout.number(name) is not None]
        names += [name for name in _others(self.root, layout) if name not in names]
        latest, self.tracker = run.pointers
        if layout.pointer == LATEST and latest.status == "ok" and latest.tag is not None and latest.tag not in names:
            names.append(latest.tag)
        self.numbers = {name: self._number(name) for name in names}
        #: the names of the checkpoints, newest first.
        self.names = sorted(names, key=lambda name: (-self._order(name), name))
        self.passed: list[Rejected] = []
        self.notes: list[str] = []
        managed = layout.managed and records_dir(self.root).is_dir()
        #: the checkpoints with megaresume records.
        self.candidates = {c.tag: c for c in (run.candidates if managed else ()) if c.records and c.has_dir}

    def _number(self, name: str) -> int | None:
        number = self.layout.number(name)
        if number is not None:
            return number
        try:
            return self.layout.number_inside(self.root / name)
        except OSError:
            return None

    def _order(self, name: str) -> int:
        number = self.numbers[name]
        return -1 if number is None else number

    def find(self) -> Newest:
        if self.candidates:
            choice = None
            try:
                choice = self.run.choose()
            except CheckpointError:
                pass  # nothing is complete by the records; the walk says why, and may find one without records
            else:
                if choice is None:
                    return self._newest(None)
            if choice is not None and choice.manifest is not None:
                self.passed, self.notes = list(choice.rejected), list(choice.notes)
                return replace(self._newest(choice.tag), iteration=choice.iteration, has_manifest=True)
        return self._by_files()

    def _newest(self, name: str | None) -> Newest:
        return Newest(
            root=self.root,
            whose=self.layout,
            path=None if name is None else self.root / name,
            iteration=None if name is None else self.numbers.get(name),
            passed_over=tuple(self.passed),
            notes=tuple(self.notes),
        )

    def _by_files(self) -> Newest:
        named, number, problem = named_by(self.run, self.layout, self.names)
        if not self.names:
            if problem is not None and not problem.startswith("there is no "):
                raise CheckpointError(
                    "there is a pointer but no checkpoint",
                    found=f"{self.root}: {problem}",
                    expected="the directory that it names",
                    cause="the checkpoints were deleted or moved, or lie on a filesystem that is not mounted here",
                    action=f"restore them; or, to start over, delete {self.root / (self.layout.pointer or '')}",
                )
            return self._newest(None)
        if problem is not None:
            self.notes.append(problem)
        if self._pointers_disagree(named):
            named, number = None, None
        limit = number if named is None or number is not None else self.numbers[named]
        newer = [name for name in self.names if limit is not None and self._order(name) > limit and name != named]
        rest = [name for name in self.names if name not in newer and name != named]
        if self.layout.pointer_commits and named == RELEASE:
            newer, rest = [], self.names[:]
            rest.remove(RELEASE)
        if self.layout.pointer_commits:
            for name in newer:
                self._pass(name, f"it is newer than {self.layout.pointer} ({limit}), which moves when a save is over")
            newer = []
        elif newer and named is not None:
            self.notes.append(f"{self.layout.pointer} names {named}, although {', '.join(newer[:5])} is newer")
        for name in ([named] if named is not None else []) + rest + newer:
            reason = self._reason(name)
            if reason is None:
                return self._newest(name)
            self._pass(name, reason)
        raise CheckpointError(
            f"none of the {len(self.names)} checkpoints in {self.root} is complete",
            found="\n    ".join(["", *self.notes, listed(self.passed, _SHOWN, "\n    ")]),
            expected=f"a complete checkpoint of {self.layout.title}",
            cause="the first save was killed, or the files were damaged afterwards",
            action="restore a checkpoint from a copy; to start over, move these away or save into an empty directory",
        )

    def _pointers_disagree(self, named: str | None) -> bool:
        """DeepSpeed's ``latest`` beside a tracker, as Megatron-DeepSpeed writes them."""
        if self.layout is not DEEPSPEED or named is None:
            return False
        if self.tracker.iteration in (None, self.numbers[named]):
            return False
        self.notes.append(
            f"the pointers disagree: {LATEST} names {named}, {TRACKER} {self.tracker.text}; newest first then"
        )
        return True

    def _pass(self, name: str, reason: str) -> None:
        self.passed.append(Rejected(tag=name, iteration=self.numbers[name], reason=reason))

    def _reason(self, name: str) -> str | None:
        """Why a checkpoint is not taken; None if it is complete."""
        candidate = self.candidates.get(name)
        if candidate is not None and not self._is_done_by_megatron(candidate):
            examined = self.run.examine(candidate)
            return None if examined.status == "complete" else f"{examined.status}: {examined.reason}"
        look = look_at(self.root, self.layout, name)
        if look.problems:
            return listed(look.problems, 5, "; ")
        self.notes += [f"{name}: {note}" for note in look.notes]
        return None

    def _is_done_by_megatron(self, candidate: Candidate) -> bool:
        """Whether Megatron finished a save and moved its tracker, but a kill prevented our records for it."""
        return self.layout is MEGATRON and candidate.unfinished and self.tracker.tag == candidate.tag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("dir", metavar="DIR", type=Path, help="a directory of checkpoints")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help="whose checkpoints (default: recognised)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tag", action="store_true", help="print only the directory's name")
    what.add_argument("--iteration", action="store_true", help="print only the iteration")
    what.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--allow-none",
        action="store_true",
        help="if there is no checkpoint at all, print nothing and exit with 0: for the first start of a run",
    )


def run(args: argparse.Namespace) -> int:
    """Print the newest complete checkpoint. Returns 1 if there is none, else 0."""
    try:
        found = find_newest(Run(args.dir), LAYOUTS.get(args.layout)) if args.dir.exists() else None
        if found is None or found.path is None:
            return _none(args, found)
    except UsageError:
        raise
    except MegaresumeError as error:
        if args.json:
            print(json.dumps({"path": None, "error": str(error)}))
        raise
    for rejected in found.passed_over:
        print(f"megaresume: not {visible(str(rejected))}", file=sys.stderr)
    for note in found.notes:
        print(f"megaresume: {visible(note)}", file=sys.stderr)
    if args.json:
        print(json.dumps(plain(found)))
    elif args.tag:
        print(found.tag)
    elif args.iteration:
        if found.iteration is None:
            raise CheckpointError(
                "the newest complete checkpoint has no iteration",
                found=str(found.path),
                expected="a directory whose name or content tells one",
                action="print its path or its name: --tag",
            )
        print(found.iteration)
    else:
        write_bytes(os.fsencode(found.path) + b"\n")  # a path is bytes: pass it to scripts unchanged
    return 0


def _none(args: argparse.Namespace, found: Newest | None) -> int:
    if args.json:
        print(json.dumps({"path": None, "error": None}))
    if args.allow_none:
        for note in () if found is None else found.notes:
            print(f"megaresume: {visible(note)}", file=sys.stderr)
        return 0
    error = CheckpointError(
        "there is no checkpoint",
        found=f"no such directory: {args.dir}" if not args.dir.exists() else f"none in {args.dir}",
        expected="iter_*, global_step*, global_step_* or checkpoint-* directories",
        cause="the run has not saved yet, or saves elsewhere",
        action="check the path; for the first start of a run, --allow-none prints nothing and exits with 0",
    )
    print(f"megaresume: error: {error}", file=sys.stderr)
    return 1
