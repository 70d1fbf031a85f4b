"""Histories of a run on machines with disks of their own, held against a model that reads no ledger:
``python -m tests.checkpoint.store.histories --count 1000``.

The driver decides who starts where, what is saved, what is copied before a kill, which disks are lost and which come
back; it goes back by tag and by pointers, and lets a writer go on that has lost the store. It knows itself which save
follows which. After every start it knows what must have been loaded, which saves of which machine must be in the store,
and which were given up, in the ledger of every disk and of the store.

The one rule that it knows: a run goes on from what its last start has saved, as far as the machine can know; what did
not lead there is given up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from megaresume.checkpoint.copies.places import missing_lines
from megaresume.checkpoint.copies.session_copies import Staged
from megaresume.checkpoint.copies.store_place import StorePlace
from megaresume.checkpoint.load.choose import choose, choose_of_two
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.lock import lock
from megaresume.checkpoint.records.branches import saves_given_up, saves_of_present
from megaresume.checkpoint.records.step_file import new_id
from megaresume.checkpoint.save import commit
from megaresume.checkpoint.save.retention import KEEP_ALL
from megaresume.checkpoint.starts import record_start, restore_older
from megaresume.checkpoint.store.lease import newest_head
from tests.checkpoint.conftest import make_state, save_checkpoint


class Wrong(AssertionError):
    """What was done is not what the model says."""


@dataclass(eq=False)
class Save:
    """Of the model."""

    step: int
    #: the save before it; None: it is the first of the run.
    before: Save | None
    #: of all starts, and within it.
    order: tuple[int, int]
    salt: int
    save_id: str = ""

    def way(self) -> set[Save]:
        """It, and what led to it."""
        found, one = set[Save](), self
        while one is not None:
            found.add(one)
            one = one.before  # type: ignore[assignment]
        return found

    def __repr__(self) -> str:
        return f"{self.step}.{self.salt}"


def given_up(known: set[Save]) -> set[Save]:
    """What did not lead to the newest one."""
    present = max(known, key=lambda save: save.order, default=None)
    return known - (set() if present is None else present.way())


@dataclass(eq=False)
class Machine:
    path: Path
    #: what is on its disk, by step.
    disk: dict[int, Save] = field(default_factory=dict)
    #: what its ledger tells of.
    known: set[Save] = field(default_factory=set)
    #: what its pointers name.
    named: Save | None = None
    #: whose commit was cut off.
    cut: Save | None = None


class History:
    """One run.

    Args:
        root: an empty directory.
        seed: of what happens.
        kind: of the store: "directory", or "store", which is one of fsspec's in memory.
    """

    def __init__(self, root: Path, seed: int, kind: str) -> None:
        self.root, self.kind, self.random = root, kind, random.Random(seed)
        self.to = str(root / "shared") if kind == "directory" else f"memory://{new_id()}/run"
        if kind == "directory":
            (root / "shared").mkdir()
        self.machines = [Machine(root / name) for name in "abc"]
        #: what counts where the copies are, by step; what the ledger there tells of, and the pointers.
        self.copied: dict[int, Save] = {}
        self.known: set[Save] = set()
        self.named: Save | None = None
        self.is_told = False
        self.starts = self.salt = 0
        self.told: list[str] = []

    # What happens

    def go_on(self) -> None:
        """Something happens."""
        machine = self.random.choice(self.machines)
        kind = self.random.choices(
            ("start", "killed", "back", "point", "lose", "cut", "duel"), (5, 5, 3, 1, 1, 2, 2 * (self.kind == "store"))
        )[0]
        saves = self.random.randint(0, 3)
        if kind == "lose":
            shutil.rmtree(machine.path, ignore_errors=True)
            machine.disk, machine.known, machine.named, machine.cut = {}, set(), None, None
            self.told.append(f"{machine.path.name} is lost")
        elif kind == "point" and machine.disk:
            self._point(machine, self.random.choice(list(machine.disk.values())))
        elif kind == "back" and machine.disk:
            tag = self.random.choice(list(machine.disk.values()))
            self.start(machine, saves, self.random.randint(0, saves), tag=tag, is_killed=self.random.random() < 0.5)
        elif kind == "duel" and self.is_told:
            self.duel(machine, self.random.choice([one for one in self.machines if one is not machine]))
        elif kind == "cut":
            self.start(machine, saves + 1, self.random.randint(0, saves), is_killed=True, is_cut=True)
        else:
            copies = saves if kind == "start" else self.random.randint(0, saves)
            self.start(machine, saves, copies, is_killed=kind == "killed")

    def _point(self, machine: Machine, save: Save) -> None:
        """A user moves the pointers of a disk."""
        (machine.path / "latest").write_text(f"global_step{save.step}")
        (machine.path / "latest_checkpointed_iteration.txt").write_text(str(save.step))
        machine.named = save
        self.told.append(f"{machine.path.name} points at {save}")

    def start(
        self,
        machine: Machine,
        saves: int,
        copies: int,
        *,
        tag: Save | None = None,
        is_killed: bool = False,
        is_cut: bool = False,
    ) -> None:
        """One start.

        Args:
            machine: where.
            saves, copies: how many it makes, and how many of them are copied before it ends or is killed.
            tag: what it is told to load.
            is_killed: as soon as these are copied; if none is, nothing of earlier starts is copied either.
            is_cut: the last save is whole when the kill comes, and nothing else of its commit.
        """
        name = machine.path.name
        self.told.append(
            f"{name}: {'from ' + str(tag) if tag else 'start'}, {saves} saves, {copies} copied"
            f"{', killed' * is_killed}{' in the last save' * is_cut}"
        )
        session = self.begin(machine, tag)
        if not is_killed or copies or not self.is_told:
            self.copies_begin(session)
        for number in range(saves):
            self.save(session, is_copied=number < copies, is_cut=is_cut and number == saves - 1)
        self.end(session)

    def duel(self, machine: Machine, other: Machine) -> None:
        """A writer is taken for dead, another one goes on, and then it goes on, too."""
        self.told.append(f"{machine.path.name}: start, and stopped; meanwhile")
        session = self.begin(machine, None)
        if self.random.random() < 0.7:
            self.copies_begin(session)
            if self.random.random() < 0.7:
                self.save(session, is_copied=True)
        self.start(other, *self.random.choice(((1, 1), (2, 2), (2, 1), (0, 0))))
        before = self.counting()
        self.told.append(f"{machine.path.name} goes on, and saves")
        session.is_fenced = True
        self.save(session, is_copied=session.is_copying)
        time.sleep(0.02)
        self.end(session)
        if self.counting() != before:
            raise Wrong(f"a writer that had lost the store has changed {before} to {self.counting()}")

    # A start, as a session makes it, and what the model makes of it

    def begin(self, machine: Machine, tag: Save | None) -> Session:
        self.starts += 1
        lock.release(machine.path) if machine.path.exists() else None
        staged = Staged(str(machine.path), self.to, KEEP_ALL)
        restore_older(machine.path)
        expected = tag or self.expected(machine)
        passed: dict[Path, str] = {}

        def pick() -> Choice | None:
            if tag is not None:
                return choose(machine.path, tag=f"global_step{tag.step}")
            return choose_of_two(machine.path, staged.shared, damaged=passed)

        found = staged.bring(pick, passed, lambda: None) if staged.is_remote else pick()
        loaded = None if found is None or found.record is None else found.record.save_id
        if loaded != (expected and expected.save_id):
            raise Wrong(f"{found} was loaded, save {loaded}, and not {expected}")
        if self.is_told:  # what was cut off comes before what others have done since
            machine.known |= {machine.cut} - {None}
        machine.known |= self.known
        staged.adopt(is_fresh=False)
        step = 0 if expected is None else expected.step
        record_start(machine.path, iteration=step, state=make_state(step * 8), choice=found)
        if expected is not None:
            # A commit that was cut off is finished if it is loaded.
            if machine.cut is expected:
                machine.known.add(expected)
                machine.named = expected
            if staged.is_remote and machine.disk.get(step) is not expected:
                machine.disk[step] = expected
                machine.named = expected
        machine.cut = None
        return Session(self, machine, staged, expected)

    def expected(self, machine: Machine) -> Save | None:
        """What a start without a tag loads."""
        known = machine.known | self.known | {machine.cut} - {None}
        present = max(known, key=lambda save: save.order, default=None)
        if present is None:
            return None
        way, local = present.way(), machine.named
        if machine.cut is not None and (local is None or machine.cut.step > local.step):
            local = machine.cut
        choices = [one for one in (local, self.named) if one is not None]
        return max(choices, key=lambda save: (save in way, save.step, save is local), default=None)

    def copies_begin(self, session: Session) -> None:
        session.is_copying = self.is_told = True
        step = 0 if session.tip is None else session.tip.step
        session.staged.start(step, saves_of_present(session.machine.path))
        until = time.monotonic() + 20
        while missing_lines(session.machine.path, session.staged.shared) and time.monotonic() < until:
            time.sleep(0.001)
        self._wait(session)
        self._copied(session, session.tip)

    def _copied(self, session: Session, save: Save | None) -> None:
        """The model: what led to a save is copied, as far as it is on the disk."""
        self.known |= session.machine.known
        lost = given_up(session.machine.known)
        for one in sorted(save.way() if save else (), key=lambda one: one.step):
            if session.machine.disk.get(one.step) is one and self.copied.get(one.step) is not one:
                self.copied[one.step] = one
                if one.order[0] == session.number or self.named in {None, *lost} or one.step > self.named.step:
                    self.named = one

    def save(self, session: Session, *, is_copied: bool, is_cut: bool = False) -> None:
        self.salt += 1
        machine, tip = session.machine, session.tip
        step = (0 if tip is None else tip.step) + self.random.choice((1, 2, 3, 5))
        with mock.patch.object(commit, "publish") if is_cut else contextlib.nullcontext():
            made = save_checkpoint(machine.path, step, checksums=True, salt=self.salt)
        session.saved += 1
        save = Save(step, tip, (session.number, session.saved), self.salt, made.record.save_id)
        machine.disk[step] = session.tip = save
        if is_cut:
            machine.cut = save
        else:
            machine.known.add(save)
            machine.named = save
        if is_copied:
            session.staged.submit(step, f"global_step{step}")
            if not session.is_fenced:
                self._wait(session)
                self._copied(session, save)

    def _wait(self, session: Session) -> None:
        stager, until = session.staged.stager, time.monotonic() + 20
        assert stager is not None
        while stager.waiting():
            if time.monotonic() > until:
                raise Wrong(f"{stager.waiting()} are not copied")
            time.sleep(0.001)

    def end(self, session: Session) -> None:
        session.staged.close(0.0 if session.is_fenced else 20.0)
        lock.release(session.machine.path)
        if not session.is_fenced:
            self.judge(session)

    # What there is

    def counting(self) -> dict[int, str]:
        """What counts where the copies are, by step."""
        if self.kind == "directory":
            found = {}
            for path in (self.root / "shared/megaresume").glob("step_*.manifest.json"):
                step = int(path.name[5:12])
                if (self.root / f"shared/global_step{step}").is_dir():
                    found[step] = str(json.loads(path.read_text())["save_id"])
            return found
        head = newest_head(StorePlace(self.to, print).store)
        return {} if head is None else {saved.iteration: saved.save_id for saved in head.saves}

    def judge(self, session: Session) -> None:
        """Hold what there is against the model."""
        if (found := self.counting()) != (expected := {step: one.save_id for step, one in self.copied.items()}):
            names = {one.save_id: one for one in [*self.known, *session.machine.known]}
            there = {step: names.get(save, save) for step, save in found.items()}
            raise Wrong(
                f"{dict(sorted(there.items()))} are copied, and not {dict(sorted(self.copied.items()))}: {expected}"
            )
        for root, known in ((session.machine.path, session.machine.known), (session.staged.shared, self.known)):
            lost = given_up(known)
            if root.exists() and saves_given_up(root) != {one.save_id for one in lost}:
                by_id = {one.save_id: one for one in known}
                wrong = sorted(map(str, (by_id.get(one, one) for one in saves_given_up(root))))
                raise Wrong(f"in {root} {wrong} were given up, and not {sorted(map(str, lost))}")


class Session:
    """A start that is under way."""

    def __init__(self, history: History, machine: Machine, staged: Staged, tip: Save | None) -> None:
        self.machine, self.staged, self.tip, self.number = machine, staged, tip, history.starts
        self.saved = 0
        self.is_copying = self.is_fenced = False


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A directory in memory."""
    with tempfile.TemporaryDirectory(prefix="megaresume-histories-", dir="/dev/shm") as directory:
        yield Path(directory)


def run(seed: int, kind: str, events: int = 12) -> History:
    """One history of so many events.

    Raises:
        Wrong: with all that happened.
    """
    with place() as root:
        history = History(root, seed, kind)
        try:
            for _ in range(events):
                history.go_on()
        except Exception as error:
            raise Wrong(f"seed {seed}, {kind}:\n  " + "\n  ".join(history.told) + f"\n{error!r}") from error
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began, starts = time.monotonic(), 0
    for seed in range(args.seed, args.seed + args.count):
        for kind in ("directory", "store"):
            starts += run(seed, kind).starts
        if seed % 20 == 19:
            print(f"{seed + 1 - args.seed} histories in each kind of place, {starts} starts", flush=True)
    print(
        f"{2 * args.count} histories, {starts} starts, as the model says, {time.monotonic() - began:.0f} s", flush=True
    )


if __name__ == "__main__":
    main()
