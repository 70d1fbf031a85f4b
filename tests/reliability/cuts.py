"""Power cuts: a recorded job, cut at any moment on any of the file systems of `storage`, and what the next start makes
of what is left.

    recording -> Cuts: every version of a checkpoint, as it was when it was announced
              -> moments x models x styles -> directory -> next start -> `Verdict`

Nothing of the code under test is asked which checkpoints there are and what is in them: the recording tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import re
import shutil
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pytest

from megaresume.checkpoint import system
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.names import TRACKER
from megaresume.checkpoint.records.pointers import read_pointer
from megaresume.checkpoint.save.retention import put_back
from megaresume.checkpoint.starts import distrust_tracker
from megaresume.hosts.megatron.load_rules import check_tracker
from megaresume.stream.errors import MegaresumeError
from tests.reliability.harness import Harness, Lost, newest_complete
from tests.reliability.job import MEGATRON, Kind, Task
from tests.reliability.recording import Files, Node, Recording, Tree, read
from tests.reliability.saves import ROOT, SCENARIOS, record
from tests.reliability.storage import MODELS, STYLES, Choices, Model, Storage, Style

__all__ = ["Cut", "Cuts", "Started", "Verdict", "Version", "chooses", "power_cuts", "record_job", "starts"]

#: the record that says that a checkpoint is complete, and which save it is of: all its files are there by now.
MANIFEST: Final = re.compile(r"step_([0-9]{7})\.manifest\.json")

#: rows of the table.
CHOICE: Final = "power cut, {}: what the next start chooses"
START: Final = "power cut, all of these: a real next start"
#: stages of the real jobs.
ZERO: Final = (1, 3)

#: resumed exactly: from the newest checkpoint that had been announced or a newer one, every byte of it as it was; or
#: from the beginning, as nothing had been announced. refused correctly: nothing had been announced, and it said so.
#: lost: it refused, failed, or went back further. other bytes: it took a checkpoint that is not as it was.
Verdict = Literal["resumed exactly", "refused correctly", "lost", "other bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """One save of a step."""

    step: int
    #: path below the checkpoints -> content, of everything that belongs to it, when it was complete.
    files: Tree
    #: how many steps of the recording were done when the announcement was forced to the disk; None: it never was.
    announced: int | None

    @property
    def manifest(self) -> str:
        """Its path."""
        return f"megaresume/step_{self.step:07d}.manifest.json"


def announcement(files: Files, step: int) -> Node | None:
    """Whether it has been announced that the checkpoint of a step is durable: it may be lost no more.

    Returns:
        what has to be forced to the disk, so that the announcement itself is there; None: it has not.
    """
    records = files.find(f"{ROOT}/megaresume")
    assert records is not None
    manifest = files.names[records].get(f"step_{step:07d}.manifest.json")
    if manifest is None or b'"durable": true' not in files.contents[manifest]:
        return None
    return records


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One power cut; the same values give the same directory again, of the same recording."""

    seed: int
    moment: int
    model: Model
    style: Style
    number: int

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.model.name}, after {self.moment} operations, {self.style} {self.number}"

    @property
    def choices(self) -> Choices:
        """What the file system likes this time."""
        return Choices(self.style, random.Random(f"{self.seed} {self.model.name} {self.moment} {self.number}"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """What a start did."""

    #: from which it went on, 0 for the beginning; None: it refused or failed.
    step: int | None
    #: what it said.
    words: str = ""
    #: what it trained otherwise than a job that was never interrupted; None: nothing.
    wrong: str | None = None
    #: what it loads from, as the checkpoints are then; None: as they were before.
    files: Tree | None = None


#: starts in a directory of checkpoints.
Start = Callable[[Path], Started]


@contextlib.contextmanager
def started_anew() -> Iterator[None]:
    """As on a machine that has lost its memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "boot_id", lambda: "after the power cut")
        yield


def chooses(root: Path) -> Started:
    """The start as far as the choice of the checkpoint, on a machine that was started anew."""
    try:
        with started_anew():
            choice = choose(root)
    except MegaresumeError as error:
        return Started(step=None, words=error.headline)
    if choice is None:
        return Started(step=0)
    if choice.record is None:
        return Started(step=None, words=f"{choice.tag} has no data state")
    words = "; ".join([*choice.notes, *map(str, choice.rejected)])
    return Started(step=choice.record.iteration, words=words, files=_read(root))


def megatron_chooses(root: Path) -> Started:
    """The same of Megatron, whose tracker decides where no manifest does."""
    try:
        with started_anew():
            distrust_tracker(root)
            found = check_tracker(Namespace(load=str(root), save=str(root)))
    except MegaresumeError as error:
        return Started(step=None, words=error.headline)
    if found is None:
        return Started(step=0)
    if isinstance(found, Choice) and found.iteration is not None:
        return Started(step=found.iteration, words="; ".join([*found.notes, *map(str, found.rejected)]))
    pointer = read_pointer(root, TRACKER)
    words = f"the tracker names {pointer.text}"
    return Started(step=pointer.iteration if pointer.status == "ok" else 0, words=words)


class Cuts:
    """The power cuts of a recording.

    Args:
        recording: of jobs whose checkpoints are in `ROOT`.
        work: for directories; on a file system in memory if there is one.
        start: what starts in them.
    """

    def __init__(self, recording: Recording, work: Path, start: Start = chooses) -> None:
        self.recording, self.work, self.start = recording, work, start
        self.storage = Storage(recording)
        self.versions = tuple(_versions(recording))
        self._known: dict[bytes, tuple[Verdict, str]] = {}
        self._numbers = itertools.count()

    @property
    def distinct(self) -> int:
        """How many different directories were judged."""
        return len(self._known)

    def sample(self, model: Model, number: int, seed: int) -> Iterator[Cut]:
        """Cuts on one file system: half of them before or after a sync or a rename, in every style (all of these, if
        there are enough); the others at random moments.
        """
        moments: set[int] = set()
        for i, step in enumerate(self.recording.steps):
            if step.kind in ("sync", "sync all") or len(step.entries) > 1:
                moments |= {i, i + 1}
        rng = random.Random(f"{seed} {model.name}")
        certain = [(moment, style) for moment in sorted(moments) for style in STYLES]
        if len(certain) > number // 2:
            certain = rng.sample(certain, number // 2)
        for moment, style in certain:
            yield Cut(seed=seed, moment=moment, model=model, style=style, number=0)
        for n in range(number - len(certain)):
            moment = rng.randint(0, len(self.recording.steps))
            yield Cut(seed=seed, moment=moment, model=model, style="anything", number=n + 1)

    def judge(self, cut: Cut) -> tuple[Verdict, str]:
        """Cut the power, start, and look at what the start does; the verdict, and its reason."""
        tree = self.storage.after_cut(cut.moment, cut.model, cut.choices)
        announced = [v for v in self.versions if v.announced is not None and v.announced <= cut.moment]
        key = hashlib.blake2b(repr((len(announced), sorted(tree.items()))).encode()).digest()
        if key not in self._known:
            directory = self.work / f"cut{next(self._numbers)}"
            _write(tree, directory)
            try:
                self._known[key] = self._judge(directory / ROOT, announced)
            finally:
                shutil.rmtree(directory)
        return self._known[key]

    def _judge(self, root: Path, announced: list[Version]) -> tuple[Verdict, str]:
        with started_anew():
            put_back(root)  # as a start does first
        for thread in threading.enumerate():
            if thread.name == "megaresume-delete":
                thread.join()
        before = _read(root)
        newest = max(announced, key=self._order, default=None)
        started = self.start(root)
        step, words = started.step, started.words
        if step is None:
            return ("refused correctly", words) if newest is None else ("lost", f"step {newest.step}: {words}")
        if step == 0 and newest is not None:
            return "lost", f"step {newest.step}: from the beginning"
        if step == 0:
            return ("lost", started.wrong) if started.wrong is not None else ("resumed exactly", words)
        files = before if started.files is None else started.files
        record = files.get(f"megaresume/step_{step:07d}.manifest.json")
        # Without one Megatron loads what its tracker names: it counts if the files are those of the save.
        named = [v for v in self.versions if v.step == step and record in (None, v.files[v.manifest])]
        version = named[-1] if named else None
        if version is None:
            return "other bytes", f"step {step}, which was never saved like that"
        own = {path: content for path, content in version.files.items() if record or path.startswith("iter_")}
        wrong = sorted(path for path, content in own.items() if content is not None and files.get(path) != content)
        if wrong:
            return "other bytes", f"step {step}: {', '.join(wrong)}" + (f"; {started.wrong}" if started.wrong else "")
        if started.wrong is not None:
            return "lost", f"step {step}: {started.wrong}"
        if newest is not None and self._order(version) < self._order(newest):
            return "lost", f"step {newest.step}: went back to {step}: {words}"
        return "resumed exactly", words

    def _order(self, version: Version) -> tuple[int, int]:
        """By step, then by when it was written: one may become durable after the next is complete."""
        return version.step, self.versions.index(version)

    def words(self, cut: Cut) -> str:
        """The last operation before a cut."""
        return self.recording.steps[cut.moment - 1].words if cut.moment else "before everything"


def record_job(harness: Harness, zero: int, kind: Kind = "stream") -> Recording:
    """A real job, which saves and ends, and a second one, which goes on from there; each checkpoint makes room for the
    next.
    """
    work = harness.new_directory()
    directory, log = work / "recorded", work / "log"
    directory.mkdir(parents=True)
    for saves in ((2, 4), (6, 8)):
        task = Task(
            kind=kind,
            zero=zero,
            data=harness.data(),
            directory=directory / ROOT,
            saves=saves,
            stop=saves[-1],
            keep=1,
            recording=log,
        )
        run = harness.run(task)
        if any(run.ends):
            raise RuntimeError(f"nothing to record: {run}")
    return read(log, directory)


def starts(harness: Harness, zero: int) -> Start:
    """A real start, which trains to the end, each step as in a job that was never interrupted, and saves."""
    stop = 10

    def start(root: Path) -> Started:
        task = Task(zero=zero, data=harness.data(), directory=root, saves=(stop,), stop=stop, keep=1)
        with started_anew():
            run = harness.run(task)
        if run.restored is None:
            return Started(step=None, words=run.errors[0]["headline"] if run.errors else f"it ended with {run.ends}")
        try:
            harness.check_resumed(run, harness.twin(zero, stop), run.restored, complete=True)
            if newest_complete(root) != stop:
                raise Lost(f"the save of step {stop} after the power cut is not complete")
        except Lost as error:
            return Started(step=run.restored, wrong=str(error))
        return Started(step=run.restored)

    return start


def power_cuts(harness: Harness, work: Path, number: int) -> Iterator[tuple[str, Verdict, str]]:
    """All of it: row of the table, verdict, and what should not have been.

    Args:
        harness: of the real jobs.
        work: for directories; on a file system in memory if there is one.
        number: cuts for every model, half of them in real jobs. One in eighty of those is followed by a real start.
    """
    alone = [Cuts(record(name, work / name), work) for name in SCENARIOS]
    jobs = {zero: record_job(harness, zero) for zero in ZERO}
    chosen = [*alone, *(Cuts(recording, work) for recording in jobs.values())]
    started = [Cuts(recording, work, starts(harness, zero)) for zero, recording in jobs.items()]
    for model in MODELS:
        for cuts, name, share in (
            *((cuts, CHOICE.format(model.name), number // len(chosen)) for cuts in chosen),
            *((cuts, START, max(1, number // 160 // len(started))) for cuts in started),
        ):
            for cut in cuts.sample(model, share, harness.seed):
                verdict, words = cuts.judge(cut)
                yield name, verdict, f"{words} ({cut}: {cuts.words(cut)})"


def power_cuts_of(harness: Harness, work: Path, kind: Kind, number: int) -> Iterator[tuple[Verdict, str]]:
    """So many cuts on every file system in a job of another kind, and what should not have been.

    Not on a node for each process if the writer of a rank is another process: they are on one.
    """
    cuts = Cuts(record_job(harness, 1, kind), work, megatron_chooses if kind in MEGATRON else chooses)
    for model in MODELS:
        if kind == "writer" and model.nodes:
            continue
        for cut in cuts.sample(model, number, harness.seed):
            verdict, words = cuts.judge(cut)
            yield verdict, f"{words} ({cut}: {cuts.words(cut)})"


def _versions(recording: Recording) -> Iterator[Version]:
    files = Files(recording.root)
    for i, step in enumerate(recording.steps):
        files.do(step)
        match = MANIFEST.fullmatch(step.entries[0].name) if step.entries else None
        if match is None or step.entries[0].directory is not files.find(f"{ROOT}/megaresume"):
            continue
        number = int(match[1])
        records = rf"megaresume/step_{number:07d}\.((manifest\.)?json|(random|loader)/.+)"
        own = re.compile(rf"(global_step{number}|iter_{number:07d})/.+|{records}")
        yield Version(
            step=number,
            files={path: content for path, content in files.tree(ROOT).items() if own.fullmatch(path)},
            announced=_announced(recording, i + 1, number),
        )


def _announced(recording: Recording, done: int, number: int) -> int | None:
    """When it was announced that the checkpoint of a step is durable, which was complete after so many steps."""
    files = Files(recording.root)
    for step in recording.steps[:done]:
        files.do(step)
    for at in range(done, len(recording.steps)):
        step, node = recording.steps[at], announcement(files, number)
        if node is not None and (step.kind == "sync all" or (step.kind == "sync" and step.node is node)):
            return at + 1
        files.do(step)
    if announcement(files, number) is not None:
        raise RuntimeError(f"that step {number} is durable was announced, and not forced to the disk itself")
    return None


def _write(tree: Tree, directory: Path) -> None:
    directory.mkdir()
    for path, content in sorted(tree.items()):
        if content is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(content)


def _read(root: Path) -> Tree:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
