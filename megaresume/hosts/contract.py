"""`HostContract`: what every host must do, as a suite of pytest tests for authors of hosts. See docs/hosts.md.

    class TestMine(HostContract):
        @pytest.fixture(scope="class")
        @classmethod
        def driver(cls) -> Driver:
            return MyDriver()

A `Driver` trains a small model with dropout on items, of which item i contains the number i. It uses `write_down` to
record what each step was given, as the model reads it. A `Job` describes one run. The suite starts few runs: one with
one rank, one with two ranks that is killed during a save, and continuations of copies of it.

    every epoch                has every item once, in another order
    killed during a save       resumed by one rank, with steps of other sizes, and by the same ranks, bit for bit
    killed between two saves   the losses are those of an uninterrupted run: dropout, optimizer, schedule
    its machine lost           resumed on an empty one from an object store, if there is a fixture ``store_url``, with
                               the URL of an empty place
    asked to stop              it saves and exits
    more items                 each comes once; without ``append`` they are refused, and so are other items
    a batch that was taken and not trained, a forgotten load, a damaged checkpoint, data restored at another position
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.hosts.driver import ITEMS, STEP, Driver, Job, copied, items, lines, losses, trained


class HostContract:
    """The contract. What a trainer cannot do, its tests say in a class attribute, and its page tells users."""

    #: ranks of the run that is killed.
    ranks = 2
    #: whether the last step of a run may have fewer samples than the others; otherwise the run ends before it.
    short_last_step = True
    #: whether one rank can load what several have saved.
    elastic = True
    #: whether the program requests a load, and so can forget it.
    asks_for_load = True
    #: whether it saves and stops when asked to.
    stops = True
    #: whether its copies may go to an object store.
    stages = True
    #: what a resume prints about the random state, if megaresume restores it.
    random_state = "random state restored"
    #: part of the message if items were added after those of the checkpoint, and if items differ.
    grown, other = "10 items were added after", "99 items"

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Driver:
        """The driver of this trainer."""
        raise NotImplementedError("a subclass has a fixture `driver`")

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A run with one rank, uninterrupted."""
        directory = tmp_path_factory.mktemp("whole") / "run"
        cls.ended(driver, cls.of_one(directory=directory))
        return directory

    @pytest.fixture(scope="class")
    @classmethod
    def order(cls, whole: Path) -> list[int]:
        """The items that it trained."""
        steps = trained(whole)
        assert [len(step) for step in steps] == cls.sizes(3 * ITEMS)
        return items(steps)

    @pytest.fixture(scope="class")
    @classmethod
    def killed(cls, driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A run with two ranks, killed in the second epoch, during the save of step 24."""
        directory = tmp_path_factory.mktemp("killed") / "run"
        ran = driver.run(cls.of_ranks(directory=directory, save_every=8, kill=("save", 24)))
        assert ran.status in (-signal.SIGKILL, 128 + signal.SIGKILL, 1), ran.said[-3000:]
        assert len(trained(directory)) == 24 and cls.newest(directory) == 16, ran.said[-3000:]
        return directory

    @pytest.fixture
    def copy(self, killed: Path, tmp_path: Path) -> Path:
        """A copy of the killed run."""
        return copied(killed, tmp_path)

    @staticmethod
    def checkpoints_of(directory: Path) -> Path:
        """The directory of a run's checkpoints: that of its job, or one within it."""
        return directory

    @classmethod
    def choice_of(cls, directory: Path) -> Choice | None:
        """The newest complete checkpoint; None if there is none."""
        return choose(cls.checkpoints_of(directory))

    @classmethod
    def newest(cls, directory: Path) -> int | None:
        """The step of the newest complete checkpoint."""
        choice = cls.choice_of(directory)
        return None if choice is None else choice.iteration

    @classmethod
    def sizes(cls, samples: int, step: int = STEP) -> list[int]:
        """The sizes of the steps that train this many samples."""
        left = samples % step if cls.short_last_step else 0
        return [step] * (samples // step) + [left] * bool(left)

    @classmethod
    def of_one(cls, **options: Any) -> Job:
        """A job with one rank, for three epochs."""
        return Job(**{"steps": len(cls.sizes(3 * ITEMS))} | options)

    @classmethod
    def of_ranks(cls, **options: Any) -> Job:
        """A job with several ranks, with the same steps as with one."""
        return cls.of_one(ranks=cls.ranks, **{"batch": 4 // cls.ranks} | options)

    @classmethod
    def again(cls, directory: Path, *, batch: int = 4, **options: Any) -> Job:
        """A job that resumes a killed one: with one rank, if that can load."""
        ranks = 1 if cls.elastic else cls.ranks
        if batch % ranks:
            pytest.skip("elastic = False: only as many ranks as have saved can load")
        return cls.of_one(directory=directory, attempt=2, ranks=ranks, batch=batch // ranks, **options)

    @staticmethod
    def ended(driver: Driver, job: Job) -> str:
        """The output of a run that ended normally."""
        ran = driver.run(job)
        assert ran.status == 0, ran.said[-6000:]
        return ran.said

    @staticmethod
    def refused(driver: Driver, job: Job, *words: str) -> None:
        """Check that a run is refused, and mentions one of these words."""
        ran = driver.run(job)
        assert ran.status != 0 and any(one in ran.said for one in words), ran.said[-6000:]

    def test_every_epoch_has_every_item_once(self, order: list[int]) -> None:
        epochs = [order[ITEMS * epoch : ITEMS * (epoch + 1)] for epoch in range(3)]
        assert all(sorted(epoch) == list(range(ITEMS)) for epoch in epochs[:2])
        assert len(set(epochs[2])) == len(epochs[2]) == sum(self.sizes(3 * ITEMS)) - 2 * ITEMS
        assert epochs[0] != epochs[1] != epochs[2]

    @pytest.mark.parametrize(
        ("batch", "accumulation"),
        [(4, 2), (4, 1), (7, 1), (2, 3)],
        ids=["same", "halved", "the last batch is short", "the last step has fewer batches"],
    )
    def test_killed_in_a_save_and_resumed_with_steps_of_other_sizes(
        self, driver: Driver, copy: Path, order: list[int], batch: int, accumulation: int
    ) -> None:
        sizes = self.sizes(3 * ITEMS - 16 * STEP, batch * accumulation)
        job = self.again(copy, batch=batch, accumulation=accumulation, steps=16 + len(sizes))
        said = self.ended(driver, job)
        assert "repeated 0 skipped 0" in said, said[-3000:]
        steps = trained(copy)
        handed = items(steps)
        assert handed[: len(order)] == order[: len(handed)]
        assert [len(step) for step in steps[16:]] == sizes
        entries = read_ledger(ledger_path(self.checkpoints_of(copy))).entries
        assert [(e.iteration, e.samples) for e in entries if e.kind == "finished"] == [(len(steps), len(handed))]
        assert self.newest(copy) == len(steps)

    def test_the_same_ranks_resume_bit_for_bit(
        self, driver: Driver, copy: Path, tmp_path: Path, order: list[int]
    ) -> None:
        said = self.ended(driver, self.of_ranks(directory=copy, attempt=2))
        assert self.random_state in said, said[-3000:]
        assert items(trained(copy)) == order
        self.ended(driver, self.of_ranks(directory=tmp_path / "whole"))
        assert losses(copy) == losses(tmp_path / "whole")

    def test_the_losses_are_those_of_a_run_that_nobody_killed(
        self, driver: Driver, whole: Path, tmp_path: Path
    ) -> None:
        """The checkpoint is from the end of an epoch."""
        job: dict[str, Any] = {"directory": tmp_path / "run", "save_every": 13}
        assert driver.run(self.of_one(kill=("step", 17), **job)).status != 0
        self.ended(driver, self.of_one(attempt=2, **job))
        assert next(line["step"] for line in lines(tmp_path / "run") if line["attempt"] == 2) == 14
        assert losses(tmp_path / "run") == losses(whole)

    def test_the_losses_on_an_empty_machine_are_the_same(
        self, driver: Driver, whole: Path, tmp_path: Path, order: list[int], request: pytest.FixtureRequest
    ) -> None:
        if not self.stages:
            pytest.skip("stages = False: it is refused")
        try:
            url: str = request.getfixturevalue("store_url")
        except pytest.FixtureLookupError:
            pytest.skip("no fixture `store_url`")
        job: dict[str, Any] = {"directory": tmp_path / "run", "save_every": 13, "stage_to": url}
        ran = driver.run(self.of_one(kill=("step", 17), **job))
        assert ran.status in (-signal.SIGKILL, 128 + signal.SIGKILL, 1), ran.said[-3000:]
        assert len(trained(tmp_path / "run")) >= 16, ran.said[-3000:]
        shutil.rmtree(tmp_path / "run")
        said = self.ended(driver, self.of_one(attempt=2, **job))
        assert f"is brought from {url}" in said, said[-3000:]
        assert next(line["step"] for line in lines(tmp_path / "run") if line["attempt"] == 2) == 14
        assert items(trained(tmp_path / "run")) == order
        assert losses(tmp_path / "run") == losses(whole)

    def test_it_saves_and_stops_when_asked(self, driver: Driver, tmp_path: Path, order: list[int]) -> None:
        if not self.stops:
            pytest.skip("stops = False: the trainer is not asked to stop")
        directory = tmp_path / "run"
        driver.run(self.of_one(directory=directory, stop_after=7))
        assert self.newest(directory) == len(trained(directory)) == 7
        sizes = self.sizes(ITEMS)
        self.ended(driver, self.of_one(directory=directory, attempt=2, epochs=1, steps=len(sizes)))
        assert items(trained(directory)) == order[: sum(sizes)]

    def test_more_items(self, driver: Driver, copy: Path, order: list[int]) -> None:
        more = ITEMS + 10
        steps = -(-(2 * ITEMS + more) // STEP)
        self.refused(driver, self.again(copy, items=more, steps=steps), self.grown)
        self.ended(driver, self.again(copy, items=more, append="next_epoch", steps=steps))
        handed = items(trained(copy))
        assert handed[: 2 * ITEMS] == order[: 2 * ITEMS]
        assert sorted(handed[2 * ITEMS : 2 * ITEMS + more]) == list(range(more))

    def test_other_items_are_refused(self, driver: Driver, copy: Path) -> None:
        self.refused(driver, self.again(copy, items=ITEMS - 1), self.other)

    def test_a_batch_that_was_taken_and_not_trained(self, driver: Driver, tmp_path: Path) -> None:
        words = ("taken and not trained", "something else read from the loader", "moved while it was being read")
        self.refused(driver, self.of_one(directory=tmp_path / "run", mistake="look", save_every=8), *words)
        assert self.newest(tmp_path / "run") is None

    def test_a_forgotten_load(self, driver: Driver, copy: Path) -> None:
        """Nothing is trained, and nothing that exists is changed."""
        if not self.asks_for_load:
            pytest.skip("asks_for_load = False: the trainer loads by itself")
        choice = self.choice_of(copy)
        assert choice is not None
        files = {path: path.read_bytes() for path in choice.tag_dir.rglob("*") if path.is_file()}
        before = len(lines(copy))
        self.refused(driver, self.again(copy, mistake="load"), "did not load a checkpoint")
        assert len(lines(copy)) == before and self.newest(copy) == 16
        assert all(path.read_bytes() == content for path, content in files.items())

    def test_data_that_comes_back_at_another_place(self, driver: Driver, copy: Path) -> None:
        """Nothing is trained, as the samples would not be those that the weights have not seen."""
        before = len(lines(copy))
        words = (
            "did not come back to the place where it was saved",
            "is before the state that the stream continues from",
        )
        self.refused(driver, self.again(copy, mistake="place"), *words)
        assert len(lines(copy)) == before and self.newest(copy) == 16

    def test_a_damaged_checkpoint_is_passed_over(self, driver: Driver, copy: Path, order: list[int]) -> None:
        choice = self.choice_of(copy)
        assert choice is not None
        max((path for path in choice.tag_dir.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size).write_bytes(
            b""
        )
        self.ended(driver, self.again(copy))
        assert next(line["step"] for line in lines(copy) if line["attempt"] == 2) == 9
        assert items(trained(copy)) == order
