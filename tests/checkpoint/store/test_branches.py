"""A run goes back, and a disk still holds what was saved of later steps and never copied: that is never copied either,
neither now nor by any later start, whether the copies go to a directory or to a store."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaresume.checkpoint.copies.session_copies import Staged
from megaresume.checkpoint.copies.stager import stage
from megaresume.checkpoint.copies.store_place import StorePlace, place_of
from megaresume.checkpoint.load.choose import choose, choose_of_two
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.branches import branches_of, saves_given_up, saves_of_present
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.step_file import new_id
from megaresume.checkpoint.save import commit
from megaresume.checkpoint.save.retention import KEEP_ALL, Retention
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.store.lease import Head, newest_head
from tests.checkpoint.conftest import make_state, save_checkpoint
from tests.checkpoint.store import histories
from tests.release import release


class Run:
    """Starts of one run on machines with disks of their own."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root, self.kind = root, kind
        self.to = str(root / "shared")
        if kind == "directory":
            (root / "shared").mkdir()
        else:
            pytest.importorskip("fsspec")
            self.to = f"memory://{new_id()}/run"

    def start(
        self,
        disk: str,
        saves: tuple[int, ...] = (),
        *,
        copies: bool = True,
        tag: str | None = None,
        retention: Retention = KEEP_ALL,
        salt: int = 0,
    ) -> int:
        """One start on a machine, as a session makes it; ``copies``: False: it is killed before anything is copied but
        the line of its start.

        Returns:
            the step that it began from.
        """
        local = self.root / disk
        staged = Staged(str(local), self.to, retention)
        choice = self._chosen(staged, local, tag)
        began = 0 if choice is None or choice.iteration is None else choice.iteration
        staged.adopt(is_fresh=False)
        record_start(local, iteration=began, state=make_state(began * 8), choice=choice)
        assert staged.place is not None
        staged.place.share_ledger(local)
        if copies:
            staged.start(began, saves_of_present(local))
        for iteration in saves:
            save_checkpoint(local, iteration, checksums=True, salt=salt)
            if copies:
                staged.submit(iteration, f"global_step{iteration}")
        while staged.stager is not None and staged.stager.waiting() and copies:
            time.sleep(0.005)
        staged.close(60)
        return began

    def _chosen(self, staged: Staged, local: Path, tag: str | None) -> Choice | None:
        passed: dict[Path, str] = {}

        def pick() -> Choice | None:
            return choose(local, tag=tag) if tag else choose_of_two(local, staged.shared, damaged=passed)

        return staged.bring(pick, passed, lambda: None) if staged.is_remote else pick()

    def point(self, disk: str, step: int) -> None:
        """Move the pointers on a disk, as a user does."""
        (self.root / disk / "latest").write_text(f"global_step{step}")
        (self.root / disk / "latest_checkpointed_iteration.txt").write_text(str(step))

    def saves(self, disk: str) -> dict[int, str]:
        """Of the checkpoints on a disk: their saves."""
        records = (self.root / disk / "megaresume").glob("step_???????.json")
        return {int(path.name[5:12]): json.loads(path.read_text())["save_id"] for path in records}

    def copied(self) -> dict[int, str]:
        """What counts where the copies are, likewise."""
        if self.kind == "directory":
            manifests = (self.root / "shared" / "megaresume").glob("step_*.manifest.json")
            found = {int(path.name[5:12]): json.loads(path.read_text())["save_id"] for path in manifests}
            return {step: save for step, save in found.items() if (self.root / f"shared/global_step{step}").is_dir()}
        head = self._head()
        return {saved.iteration: saved.save_id for saved in head.saves}

    def _head(self) -> Head:
        place = place_of(self.to)
        assert isinstance(place, StorePlace)
        head = newest_head(place.store)
        assert head is not None
        return head

    def named(self) -> str:
        """What the pointer names there."""
        if self.kind == "directory":
            return (self.root / "shared" / "latest").read_text()
        return str(self._head().latest)


@pytest.fixture(params=["directory", "store"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    yield Run(tmp_path, request.param)


def test_a_disk_comes_back_with_a_branch_that_was_given_up(run: Run) -> None:
    """Another machine has gone back to what was copied, and on: whichever of the two has come further."""
    run.start("a", (10, 20))
    assert run.start("a", (30, 40, 50, 60), copies=False) == 20
    assert run.start("b", (25, 30, 35), salt=1) == 20
    present = run.copied()
    assert run.start("a", (45,), salt=2) == 35
    assert sorted(run.copied()) == [10, 20, 25, 30, 35, 45] and run.named() == "global_step45"
    assert {step: save for step, save in run.copied().items() if step < 45} == present
    # The steps are those of the branch by now.
    assert run.start("b", (50, 60, 70), salt=3) == 45
    assert run.start("a") == 70
    copied = run.copied()
    assert sorted(copied) == [10, 20, 25, 30, 35, 45, 50, 60, 70]
    assert copied[50] == run.saves("b")[50] and copied[60] == run.saves("b")[60]


def test_both_have_come_to_the_same_step(run: Run) -> None:
    """Of the two saves of it, that of the present is taken."""
    run.start("a", (10,))
    run.start("a", (20, 30), copies=False)
    assert run.start("b", (20, 30), salt=1) == 10
    present = run.copied()
    assert run.start("a") == 30
    assert run.copied() == present
    assert run.start("a", (40,)) == 30
    assert {step: save for step, save in run.copied().items() if step < 40} == present


def test_a_start_that_goes_back_on_purpose(run: Run) -> None:
    """Nothing that is newer is copied any more, in whichever way the older one was asked for."""
    run.start("a", (10, 20))
    run.start("a", (30, 40, 50), copies=False)
    assert run.start("a", (22,), tag="global_step10", salt=1) == 10
    assert sorted(run.copied()) == [10, 20, 22] and run.named() == "global_step22"
    assert run.start("a") == 22
    assert run.start("a", (60,)) == 22
    assert sorted(run.copied()) == [10, 20, 22, 60]


def test_pointers_that_were_moved_back(run: Run) -> None:
    run.start("a", (10, 20))
    run.start("a", (30, 40, 50), copies=False)
    run.point("a", 20)
    assert run.start("a") == 20
    assert sorted(run.copied()) == [10, 20]
    run.point("a", 50)  # nothing came of it: the branch is the present again
    assert run.start("a") == 50
    assert sorted(run.copied()) == [10, 20, 30, 40, 50] and run.named() == "global_step50"


def test_copies_that_fall_behind_a_run_that_went_back(run: Run) -> None:
    """Their pointers name what was given up, until the first copy of the present, though the local ones are further."""
    run.start("a", (10, 20, 30))
    assert run.start("a", (12, 14, 16), tag="global_step10", salt=1, copies=False) == 10
    place = place_of(run.to)
    place.hold(run.root / "a", lambda: None)
    assert stage(run.root / "a", place, 12, "global_step12") is not None and run.named() == "global_step12"
    place.release()
    shutil.rmtree(run.root / "a")
    assert run.start("b", (14,), salt=2) == 12 and run.named() == "global_step14"


def test_a_machine_that_went_back_alone(run: Run) -> None:
    """Another one has continued from before it: its own branch was given up, and that one never was."""
    run.start("a", (10, 20, 30))
    assert run.start("a", (12, 14, 45), tag="global_step10", salt=1, copies=False) == 10
    assert run.start("b", (40,)) == 30
    present = run.copied()
    assert sorted(present) == [10, 20, 30, 40]
    assert run.start("a", (50,), salt=2) == 40
    assert {step: save for step, save in run.copied().items() if step < 50} == present
    given_up = saves_given_up(run.root / "a")
    assert given_up == {save for step, save in run.saves("a").items() if step in (12, 14, 45)}


def test_a_start_from_a_branch_that_was_given_up(run: Run) -> None:
    """What led to it is the present again, and what took another way is not."""
    run.start("a", (10,))
    run.start("a", (20, 30), copies=False)
    run.start("a", (15, 25), tag="global_step10", salt=1, copies=False)
    assert run.start("a", (40,), tag="global_step20", salt=2) == 20
    assert sorted(run.copied()) == [10, 20, 40] and run.named() == "global_step40"
    assert run.start("a", (50,), salt=3) == 40
    assert sorted(run.copied()) == [10, 20, 40, 50]


def test_a_commit_that_was_cut_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its save there is no line in the ledger when another machine goes on: it is given up all the same."""
    run.start("a", (10,))
    with monkeypatch.context() as patch:
        patch.setattr(commit, "publish", lambda *_, **__: None)
        run.start("a", (20,), copies=False)
    assert run.start("b", (15,), salt=1) == 10
    assert run.start("a", (30,), salt=2) == 15
    assert sorted(run.copied()) == [10, 15, 30]


def test_a_commit_that_was_cut_off_and_is_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.start("a", (10,))
    with monkeypatch.context() as patch:
        patch.setattr(commit, "publish", lambda *_, **__: None)
        run.start("a", (20,), copies=False)
    assert run.start("a") == 20
    assert sorted(run.copied()) == [10, 20] and run.named() == "global_step20"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["directory", "store"])
def test_whatever_happens(kind: str, seed: int) -> None:
    """Histories of chance, held against a model that reads no ledger."""
    pytest.importorskip("fsspec")
    assert histories.run(seed, kind).starts


@release("500 histories in each kind of place", "the same, of six")
def test_whatever_happens_1000_times() -> None:
    for seed in range(500):
        for kind in ("directory", "store"):
            histories.run(1000 + seed, kind)


def test_what_was_begun_from_is_named(run: Run) -> None:
    """The pointers name an older one, which is gone: those of the copies name what the run goes on from."""
    run.start("a", (10,))
    run.start("a", (20, 30, 40), copies=False)
    run.point("a", 20)
    shutil.rmtree(run.root / "a/global_step20")
    assert run.start("a") == 40
    assert sorted(run.copied()) == [10, 30, 40] and run.named() == "global_step40"


def test_a_program_that_loads_again(run: Run) -> None:
    """It goes back in the same process: what is waiting of later steps is not copied, but what is saved since is."""
    local = run.root / "a"
    run.start("a", (10,))
    run.start("a", (20, 30, 40), copies=False)
    staged = Staged(str(local), run.to, KEEP_ALL)
    assert staged.stager is not None and staged.place is not None
    staged.place.begin()
    record_start(local, iteration=40, state=make_state(320))
    with staged.stager._changed:  # nothing is copied meanwhile
        staged.start(40, saves_of_present(local))
        save_checkpoint(local, 50)
        staged.submit(50, "global_step50")
        record_start(local, iteration=10, state=make_state(80))
        staged.start(10, saves_of_present(local))
        save_checkpoint(local, 20, salt=1)
        staged.submit(20, "global_step20")
    staged.close(60)
    assert sorted(run.copied()) == [10, 20] and run.copied()[20] == run.saves("a")[20]
    assert run.start("a", (30,), salt=2) == 20 and sorted(run.copied()) == [10, 20, 30]


def test_what_is_never_copied_makes_room(run: Run) -> None:
    """Retention deletes the rest of the branch when the run has gone past it; it does not wait for copies of it."""
    run.start("a", (10,))
    run.start("a", (20, 30, 40), copies=False)
    assert run.start("b", (20, 50), salt=1) == 10
    assert run.start("a", (60, 70, 80), retention=Retention(keep_last=2)) == 50
    assert sorted(path.name for path in (run.root / "a").glob("global_step*")) == ["global_step70", "global_step80"]
    assert sorted(run.copied())[-2:] == [70, 80]


def test_without_a_rule_all_copies_stay(run: Run) -> None:
    """On a machine that has none of them."""
    run.start("a", (10, 20, 30))
    assert run.start("b", (40, 50)) == 30 and sorted(run.copied()) == [10, 20, 30, 40, 50]


def test_the_lines_of_two_branches(run: Run) -> None:
    """Wherever a ledger is read, what a machine alone knew of comes before the start that went back behind it."""
    run.start("a", (10,))
    local = run.root / "a"
    record_start(local, iteration=10, state=make_state(80))  # which the copies do not learn of
    for iteration in (20, 30):
        save_checkpoint(local, iteration, checksums=True)
    assert run.start("b", (15, 25), salt=1) == 10
    assert run.start("a", (35,), salt=2) == 25
    staged = Staged(str(run.root / "c"), run.to, KEEP_ALL)
    for root in (local, staged.shared):
        entries = read_ledger(root / "megaresume/ledger.jsonl").entries
        lost = [
            entry.iteration
            for entry, branch in zip(entries, branches_of(entries), strict=True)
            if entry.kind == "checkpoint" and branch is not None
        ]
        assert lost == [20, 30], root
        events = [(entry.kind, entry.iteration) for entry in entries if entry.kind != "durable"]
        assert events == [
            *(("start", 0), ("checkpoint", 10)),
            *(("start", 10), ("checkpoint", 20), ("checkpoint", 30)),
            *(("start", 10), ("checkpoint", 15), ("checkpoint", 25)),
            *(("start", 25), ("checkpoint", 35)),
        ]
    staged.close()


def test_a_copy_in_work(run: Run) -> None:
    """The run goes back while a later one is being copied: it does not count."""
    local = run.root / "a"
    run.start("a", (10, 20), copies=False)
    staged = Staged(str(local), run.to, KEEP_ALL)
    assert staged.place is not None
    asked: list[bool] = []

    def is_wanted() -> bool:
        asked.append(True)
        return False

    assert stage(local, staged.place, 20, "global_step20", is_wanted=is_wanted) is None and asked == [True]
    staged.close()
    assert run.kind == "directory" or run.copied() == {}
    assert not list((run.root / "shared").glob("megaresume/*.manifest.json"))
