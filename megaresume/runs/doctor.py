"""``megaresume doctor [DIR] [--log FILE]``: what may be wrong, with what it means and what to do.

    machine.py   versions, CUDA, apex, shared memory; the kind of filesystem, locks, space
    here         a directory of checkpoints from any program: which one the next start takes, what is wrong with the
                 others and with the pointers
    logs.py      ``known.yaml``: messages in users' logs, what they mean, what to do

Each returns `Check`s. Neither torch nor DeepSpeed nor Megatron is imported, and nothing is ever unpickled.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from megaresume.checkpoint.load.foreign import Layout, subdirectories
from megaresume.checkpoint.load.foreign_layouts import DEEPSPEED, HUGGING_FACE, LAYOUTS, VERL, ranks_of
from megaresume.checkpoint.lock.lock import PATIENCE_SECONDS
from megaresume.checkpoint.records.candidates import UNMANAGED
from megaresume.checkpoint.records.ledger import LedgerEntry
from megaresume.checkpoint.records.manifest import list_files
from megaresume.checkpoint.records.names import is_mirror, records_dir, step_path
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.checkpoint.starts import starts_from
from megaresume.checkpoint.system import Topology
from megaresume.command_line import at_least
from megaresume.hosts.deepspeed.load_rules import Partitions
from megaresume.render import spell_seconds
from megaresume.runs.answer import Answer, Check, Status, told
from megaresume.runs.directory import Run
from megaresume.runs.latest import Newest, find_newest, look_at, named_by, recognise
from megaresume.runs.logs import first_failure, log_checks
from megaresume.runs.machine import environment_checks, filesystem_checks
from megaresume.stream.changes import check_recorded
from megaresume.stream.errors import CheckpointError, MegaresumeError, StateError, UsageError, counted, listed
from megaresume.stream.progress import progress
from megaresume.stream.state import StreamState

_WORDS = {"problem": "PROBLEM", "warning": "warning", "note": "note", "ok": "ok"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("dir", metavar="DIR", type=Path, nargs="?", help="a directory of checkpoints (default: none)")
    parser.add_argument(
        "--log", metavar="FILE", type=Path, action="append", default=[], help="log of a launch; repeatable"
    )
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help="whose checkpoints (default: recognised)")
    parser.add_argument(
        "--dp", type=at_least(1), metavar="N", help="data-parallel size of the next launch: can it load DIR?"
    )
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), metavar="Z", help="its ZeRO stage")
    parser.add_argument(
        "--last", type=at_least(0), default=5, metavar="N", help="checkpoints to check, newest first (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run all checks. Returns 1 if there is a problem, else 0."""
    return Diagnosis(_checks(args)).give(_text, as_json=args.json)


@dataclass(frozen=True, slots=True)
class Diagnosis(Answer):
    """All checks that were made."""

    checks: list[Check]

    @told
    def problems(self) -> int:
        """The number of problems that were found."""
        return sum(check.status == "problem" for check in self.checks)

    @property
    def status(self) -> int:
        """The exit status: 1 if there is a problem."""
        return 1 if self.problems else 0


def _checks(args: argparse.Namespace) -> list[Check]:
    if args.dir is None and (args.dp is not None or args.zero_stage is not None):
        raise UsageError("--dp and --zero-stage ask about a checkpoint", expected="DIR", action="megaresume doctor DIR")
    checks = environment_checks()
    if args.dir is not None:
        layout = LAYOUTS.get(args.layout)
        found = directory_checks(Run(args.dir), layout, dp=args.dp, zero_stage=args.zero_stage, last=args.last)
        if not is_mirror(args.dir):
            checks += filesystem_checks(args.dir, found.size, found.num_files)
        checks += found.checks
    if args.log:
        for path in args.log:
            with progress(path.name, path.stat().st_size if path.is_file() else None, "B") as advance:
                checks += log_checks(path, advance)
        checks += first_failure(args.log)
    return checks


def _text(found: Diagnosis) -> str:
    checks = found.checks
    lines: list[str] = []
    area = None
    width = max(len(check.name) for check in checks if check.area != "log")
    for check in checks:
        if check.area != area:
            area = check.area
            lines += ["", area] if lines else [area]
        name = check.name.ljust(width) if area != "log" else f"{check.name}:"
        lines.append(f"  {_WORDS[check.status]:<8} {name}  {check.found}".replace("\n", "\n  "))
        if check.cause is not None:
            lines.append(f"             meaning:      {check.cause}")
        if check.action is not None:
            lines.append(f"             next action:  {check.action}")
    counts = {status: sum(check.status == status for check in checks) for status in ("problem", "warning")}
    ends = [f"{count} {word}{'s' * (count != 1)}" for word, count in counts.items() if count]
    return "\n".join([*lines, "", " and ".join(ends) or "nothing is wrong"])


#: this many starts from one place without a save in between mean that something is wrong.
_STARTS = 3
#: Names of temporary files that killed saves leave: ours, VeRL's tracker's, older releases of transformers'.
_TEMPORARY = re.compile(r".+\.tmp|tmp-checkpoint-\d+")


@dataclass(kw_only=True)
class DirectoryReport:
    """The checks of a directory, and the size of its checkpoints."""

    checks: list[Check] = field(default_factory=list)
    #: the newest complete checkpoint: bytes, files; None if there is none.
    size: int | None = None
    num_files: int | None = None

    def add(self, name: str, status: Status, found: str, cause: str | None = None, action: str | None = None) -> None:
        """Add a check to the report."""
        self.checks.append(Check("checkpoints", name, status, found, cause, action))


def directory_checks(
    run: Run, layout: Layout | None, *, dp: int | None, zero_stage: int | None, last: int
) -> DirectoryReport:
    """Check a directory of checkpoints.

    Args:
        run: the directory that contains the checkpoints.
        layout: of the checkpoints; None: recognise it.
        dp: data-parallel size of the next launch; None: do not check.
        zero_stage: its ZeRO stage; None: unchanged.
        last: how many of the newest checkpoints to check, besides the one that would be taken.

    Raises:
        UsageError: it is a single checkpoint, or has checkpoints of several programs.
    """
    found = DirectoryReport()
    layout = layout or recognise(run.root)
    if layout is None:
        found.add("newest", "note", f"no checkpoint in {run.root}", action="nothing, if the run has not saved yet")
        return found
    newest = _newest(run, layout, found)
    _each(run.root, layout, newest, last, found)
    _pointers(run, layout, newest, found)
    _leftovers(run, found)
    _holder(run, found)
    entries = _ledger(run, found)
    if newest is not None and newest.path is not None and dp is not None:
        _ranks(newest.path, layout, entries, dp, zero_stage, found)
    return found


def _newest(run: Run, layout: Layout, found: DirectoryReport) -> Newest | None:
    try:
        newest = find_newest(run, layout)
    except UsageError:
        raise
    except MegaresumeError as error:
        found.add("newest", "problem", error.line, cause=error.cause, action=error.action)
        return None
    if newest is None or newest.path is None:
        found.add("newest", "note", f"no checkpoint of {layout.title}, or only a first save that was killed")
        return newest
    files = list_files(newest.path)
    found.size, found.num_files = sum(entry.size for entry in files), len(files)
    age = time.time() - newest.path.stat().st_mtime
    by = "by its manifest" if newest.has_manifest else f"by its files ({layout.title})"
    found.add("newest", "ok", f"{newest.path.name} is complete, {by}; saved {spell_seconds(age)} ago")
    for note in newest.notes:
        found.add("newest", "warning", note)
    if newest.has_manifest and newest.iteration is not None:
        _state(run.root, newest.iteration, newest.path.name, found)
    return newest


def _state(root: Path, iteration: int, tag: str, found: DirectoryReport) -> None:
    """Check that a start can resume from the data state of a checkpoint."""
    try:
        state = read_step_file(step_path(root, iteration, tag)).state
        if isinstance(state, StreamState):
            check_recorded(state)
    except MegaresumeError as error:
        found.add("data state", "problem", f"{tag}: {error.line}", cause=error.cause, action=error.action)


def _each(root: Path, layout: Layout, newest: Newest | None, last: int, found: DirectoryReport) -> None:
    """A check for each of the newest directories: those passed over, and the older ones that would be next."""
    passed = {} if newest is None else {rejected.tag: rejected.reason for rejected in newest.passed_over}
    for tag, reason in passed.items():
        found.add(
            tag,
            "warning",
            reason,
            action="to keep it, move it elsewhere: a save of the same step replaces it"
            if reason == UNMANAGED
            else "nothing: an older one is taken; restore its files from a copy, or delete it",
        )
    if newest is None or newest.path is None:
        return  # "newest" has the reasons already
    names = [name for name in subdirectories(root) if layout.number(name) is not None and name not in passed]
    names.sort(key=lambda name: -(layout.number(name) or 0))
    managed = records_dir(root).is_dir() and layout.managed
    for name in names[:last]:
        if name == newest.path.name or managed:
            continue
        look = look_at(root, layout, name)
        if look.problems:
            text = listed(look.problems, 3, "; ")
            found.add(name, "warning", text, action="nothing, while newer ones are complete; it is not a fallback")
        for note in look.notes:
            found.add(name, "note", note)


def _pointers(run: Run, layout: Layout, newest: Newest | None, found: DirectoryReport) -> None:
    if layout.pointer is None:
        return
    root = run.root
    named, _, problem = named_by(run, layout, subdirectories(root))
    taken = None if newest is None or newest.path is None else newest.path
    if problem is not None:
        action = None
        if taken is not None and newest is not None:
            # Without an iteration it is Megatron's ``release``.
            value = taken.name if layout is DEEPSPEED or newest.iteration is None else newest.iteration
            action = f"printf %s {quote(str(value))} > {quote(str(root / layout.pointer))}"
        status: Status = "note" if problem.startswith("there is no ") and taken is None else "problem"
        cause = f"without megaresume the next start of {layout.title} starts over, or stops"
        found.add("pointer", status, problem, cause=cause, action=action)
    elif named is not None and taken is not None and named != taken.name:
        found.add(
            "pointer",
            "problem",
            f"{layout.pointer} names {named}, the newest complete checkpoint is {taken.name}",
            cause=f"without megaresume the next start of {layout.title} takes {named}",
            action=f"megaresume latest {quote(str(root))} in the launch script: docs/before-a-launch.md",
        )
    elif named is not None:
        found.add("pointer", "ok", f"{layout.pointer} names {named}")


def _leftovers(run: Run, found: DirectoryReport) -> None:
    names = list(run.leftovers)
    with contextlib.suppress(OSError):  # "newest" has reported that it cannot be listed
        names = sorted({*names, *(name for name in os.listdir(run.root) if _TEMPORARY.fullmatch(name))})
    if names:
        action = "delete them while no job saves here; the next start deletes those of megaresume"
        found.add(
            "temporary files",
            "note",
            listed(names, 5),
            cause="saves that were killed before their rename",
            action=action,
        )


def _holder(run: Run, found: DirectoryReport) -> None:
    holder = None
    with contextlib.suppress(CheckpointError):  # "newest" has reported that it cannot be listed
        holder = run.holder(ask_slurm=True)
    if holder is None or holder.status == "released":
        return
    if holder.status == "gone":
        found.add(
            "owner", "note", f"left behind by {holder}: {holder.reason}", action="nothing: the next start takes it"
        )
        return
    end = "" if holder.owner is None else f"{holder.owner.how_to_end}; or "
    found.add(
        "owner",
        "warning",
        f"held by {holder}",
        cause="a job writes here; or it is over, which cannot be told from here: then the next start sees that in "
        f"{PATIENCE_SECONDS:g} s",
        action=f"nothing, if that is the run; to start another: {end}save to another directory",
    )


def _ledger(run: Run, found: DirectoryReport) -> Sequence[LedgerEntry]:
    try:
        reading = run.ledger
    except StateError as error:
        found.add("ledger", "problem", error.line, action=error.action)
        return ()
    for problem in reading.problems:
        status: Status = "warning" if problem.kind == "damaged" else "note"
        found.add("ledger", status, str(problem))
    events = reading.events
    starts = len(starts_from(events, events[-1].iteration)) if events else 0
    if starts >= _STARTS:
        found.add(
            "progress",
            "problem",
            f"{starts} starts from iteration {events[-1].iteration:,}, and no save after any of them",
            cause="the job dies before its next save, or has less time than it needs to get there",
            action="look at the end of its log: megaresume doctor --log LOG; or save more often",
        )
    return reading.entries


def _ranks(
    path: Path, layout: Layout, entries: Sequence[LedgerEntry], dp: int, zero_stage: int | None, found: DirectoryReport
) -> None:
    """Whether the newest checkpoint can be loaded by the ranks of the next launch."""
    if layout is VERL:
        sizes = {int(m[1]) for p in path.rglob("model_world_size_*.pt") if (m := re.search(r"size_(\d+)_", p.name))}
        if sizes and sizes != {dp}:
            saved = " and ".join(map(str, sorted(sizes)))
            found.add(
                "ranks",
                "problem",
                f"FSDP's files are for {saved} ranks, the launch has {dp}",
                cause="each rank loads the file of its own rank and of this world size",
                action=f"start on {saved} ranks, or merge them: python -m verl.model_merger merge --backend fsdp",
            )
        return
    before = next((e.topology for e in reversed(entries) if e.kind == "checkpoint" and e.tag == path.name), None)
    tag, managed = path, before is not None
    if before is None:
        if layout is HUGGING_FACE:
            tags = [name for name in subdirectories(path) if DEEPSPEED.number(name) is not None]
            tag = path / tags[-1] if tags else path
        elif layout is not DEEPSPEED:
            return
        try:
            saved_dp, stage = ranks_of(tag)
        except OSError:
            return
        if saved_dp is None:
            return
        before = Topology(dp=saved_dp, zero_stage=stage)
    stage = before.zero_stage if zero_stage is None else zero_stage
    now = Partitions(ranks=dp, zero_stage=stage or 0)
    if before.zero_stage is not None and now.is_of_another_kind(before):
        found.add(
            "ranks",
            "problem",
            f"saved with ZeRO {before.zero_stage}, the launch has ZeRO {stage}",
            cause="DeepSpeed cannot load the optimizer state of another kind of ZeRO (0, 1 or 2, 3)",
            action=f"start with ZeRO {before.zero_stage}",
        )
    elif now.differ_from(before):
        into = (
            f"megaresume convert {quote(str(path.parent))} --tag {path.name}"
            if managed
            else f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder "
            f"{quote(str(tag))} --output_folder {quote(f'{tag}_universal')}, then set "
            '"checkpoint": {"load_universal": true} in the DeepSpeed config'
        )
        found.add(
            "ranks",
            "problem",
            f"saved with ZeRO {before.zero_stage} on "
            f"{counted(before.dp * before.cp, 'data-parallel rank')}, the launch has {dp}",
            cause="DeepSpeed cannot divide the optimizer state over other numbers of ranks; the data could continue",
            action=f"start on {counted(before.dp * before.cp, 'rank')}, or: {into}",
        )
    else:
        words = f"saved on {counted(before.dp, 'data-parallel rank')}"
        zero = "" if before.zero_stage is None else f" with ZeRO {before.zero_stage}"
        found.add("ranks", "ok", f"{words}{zero}; {dp} can load it")
