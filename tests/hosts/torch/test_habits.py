"""Loops with bad habits: stopped before anything wrong is trained or saved. In this process, without any other."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megaresume
from megaresume import Checkpoints, StopConditions
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.lock.lock import holder_of
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.manifest import read_manifest
from megaresume.checkpoint.records.names import deepspeed_tag, ledger_path, manifest_path
from megaresume.checkpoint.system import boot_id
from megaresume.hosts.loop import Loop
from megaresume.program import main
from megaresume.stream.errors import CheckpointError, MegaresumeError, StateError, UsageError
from megaresume.stream.state import StreamState
from tests.hosts.torch.program import Numbers


class Tried:
    """A model, its optimizer, a loader, and the loop around them."""

    def __init__(
        self,
        directory: Path,
        *,
        accumulation: int = 1,
        writer: Any = "dcp",
        stop: StopConditions | None = None,
        **options: Any,
    ) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = megaresume.DataLoader(Numbers(), batch_size=4, accumulation=accumulation, **options)
        objects = {"model": self.model, "optimizer": self.optimizer}
        self.loop: Loop = megaresume.attach(
            objects, self.loader, checkpoints=Checkpoints(save_dir=directory), writer=writer, stop=stop
        )

    def train(self, batch: torch.Tensor) -> None:
        self.model(batch.float()).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loop.stepped()

    def train_one(self) -> None:
        for batch in self.loop:
            self.train(batch)
            break


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def tried(directory: Path) -> Iterator[Tried]:
    one = Tried(directory)
    yield one
    one.loop.close()


def look_first(t: Tried) -> None:
    next(iter(t.loop))
    for batch in t.loop:
        t.train(batch)


def pass_over(t: Tried) -> None:
    for number, batch in enumerate(t.loop):
        if number != 3:
            t.train(batch)


def forget_to_say(t: Tried) -> None:
    for _ in t.loop:
        t.optimizer.step()


def train_twice(t: Tried) -> None:
    for batch in t.loop:
        t.train(batch)
        t.train(batch)


def step_twice(t: Tried) -> None:
    for batch in t.loop:
        for _ in range(2):
            t.model(batch.float()).sum().backward()
            t.optimizer.step()
        t.loop.stepped()


def read_the_loader(t: Tried) -> None:
    for batch in t.loader:
        t.train(batch)


def read_the_loader_and_ask(t: Tried) -> None:
    """It would never step, never save, and begin anew at every start."""
    for batch in t.loader:
        t.model(batch.float()).sum().backward()
        t.optimizer.step()
        if t.loop.ends_step:
            t.loop.stepped()


def evaluate_with_the_loader(t: Tried) -> None:
    t.train_one()
    for _ in t.loader:
        pass
    t.train_one()


def evaluate_with_the_loop(t: Tried) -> None:
    t.train_one()
    with torch.no_grad():
        for batch in t.loop:
            t.model(batch.float())


def save_before_the_step(t: Tried) -> None:
    for batch in t.loop:
        t.loop.save()
        t.train(batch)


def leave_before_it_is_said(t: Tried) -> None:
    """By `break`, or an exception, between the optimizer's step and ours: a resume would train the batch again."""
    t.train_one()
    for batch in t.loop:
        t.model(batch.float()).sum().backward()
        t.optimizer.step()
        break
    t.loop.save()


def step_after_the_for(t: Tried) -> None:
    for batch in t.loop:
        t.model(batch.float()).sum().backward()
        break
    t.optimizer.step()
    t.loop.save()


def two_at_a_time(t: Tried) -> None:
    one, other = iter(t.loop), iter(t.loop)
    for batches in (one, other, one):
        t.train(next(batches))


def load_in_a_for(t: Tried) -> None:
    t.train_one()
    t.loop.save()
    for batch in t.loop:
        t.train(batch)
        t.loop.load()


def catch_the_error(t: Tried) -> None:
    for batch in t.loop:
        t.train(batch)
        with pytest.raises(MegaresumeError):
            t.loop.stepped()
        t.loop.save()


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        (look_first, "taken and not trained(.|\n)*samples 0 to 3 taken since step 0, and a new `for`"),
        (
            pass_over,
            r"taken and not trained(.|\n)*samples 12 to 15 taken since step 3(.|\n)*stepped\(\) for them before",
        ),
        (forget_to_say, r"taken and not trained(.|\n)*loop\.stepped\(\) is missing"),
        (train_twice, "no micro-batch was taken for it"),
        (step_twice, r"second step, and no micro-batch(.|\n)*step of SGD, with samples 0 to 3 taken since step 0"),
        (read_the_loader, r"no micro-batch was taken(.|\n)*for batch in loop"),
        (read_the_loader_and_ask, r"something else read from the loader(.|\n)*for batch in loop"),
        (evaluate_with_the_loader, "something else read(.|\n)*sample 100; the steps of the run at sample 4"),
        (evaluate_with_the_loop, "taken and not trained"),
        (save_before_the_step, r"in the middle of a step(.|\n)*end a step if loop\.ends_step"),
        (leave_before_it_is_said, r"in the middle of a step(.|\n)*left between that step and loop\.stepped\(\)"),
        (
            step_after_the_for,
            r"middle of a step(.|\n)*cause: +loop\.stepped\(\) was not called after the optimizer step",
        ),
        (two_at_a_time, "moved while it was being read"),
        (load_in_a_for, "moved while it was being read"),
        (catch_the_error, "no micro-batch was taken"),
    ],
)
def test_stopped(tried: Tried, habit: Callable[[Tried], None], words: str) -> None:
    with pytest.raises(StateError, match=words):
        habit(tried)
    before = None if (choice := choose(tried.loop.session.roots.save_dir or "")) is None else choice.tag
    with pytest.raises(StateError):  # and nothing goes on
        tried.train_one()
    with pytest.raises(StateError):
        tried.loop.save()
    after = choose(tried.loop.session.roots.save_dir or "")
    assert (None if after is None else after.tag) == before


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_saves_of_what_a_for_has_left_over(directory: Path, writer: str) -> None:
    """torch makes a step of zeros to save an optimizer without a state: none of the loop's."""
    t = Tried(directory, writer=writer)
    t.train_one()
    batches = iter(t.loop)
    batch = next(batches)
    del batches
    for _ in range(2):
        t.loop.save()
    t.train(batch)
    t.loop.save()
    resumed = t.loop.load()
    assert resumed is not None and resumed.samples == 8
    t.loop.close()


def test_a_step_that_is_saved_is_not_saved_again_when_the_run_stops(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trigger = directory.with_name("stop")
    t = Tried(directory, stop=StopConditions(file=str(trigger)))
    with pytest.raises(SystemExit):
        for batch in t.loop:
            t.train(batch)
            t.loop.save()
            trigger.touch()
    assert "saved at step 1;" in capsys.readouterr().out
    assert [e.iteration for e in read_ledger(ledger_path(directory)).entries if e.kind == "checkpoint"] == [1]


def test_an_accumulation_that_the_loader_was_not_told(directory: Path) -> None:
    four = Tried(directory, accumulation=4)
    batches = iter(four.loop)
    next(batches)
    assert not four.loop.ends_step
    with pytest.raises(StateError, match=r"without all of its micro-batches(.|\n)*samples 0 to 3(.|\n)*all 16 samples"):
        four.loop.stepped()
    four.loop.close()


def test_whether_a_step_ends_is_said_before_and_after_it(directory: Path) -> None:
    """A loop may save by it, after ``stepped``."""
    three = Tried(directory, accumulation=3, max_epochs=1)
    said = []
    for batch in three.loop:
        three.model(batch.float()).sum().backward()
        before = three.loop.ends_step
        if before:
            three.optimizer.step()
            three.loop.stepped()
        said.append((before, three.loop.ends_step))
        if three.loop.ends_step:
            three.loop.save()
        if three.loop.step == 2:
            break
    assert said == [(False, False), (False, False), (True, True)] * 2
    three.loop.load()
    assert not three.loop.ends_step
    three.loop.close()
    ledger = read_ledger(ledger_path(directory))
    assert [e.iteration for e in ledger.entries if e.kind == "checkpoint"] == [1, 2]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loop_that_counts_micro_batches(directory: Path, drop_last: bool) -> None:
    three = Tried(directory, accumulation=3, max_epochs=1, drop_last=drop_last)

    def train() -> None:
        for number, batch in enumerate(three.loop):
            three.model(batch.float()).sum().backward()
            if number % 3 == 2:
                three.optimizer.step()
                three.loop.stepped()

    if drop_last:
        train()
        assert three.loop.step == 8
    else:
        with pytest.raises(StateError, match=r"ends within this step, after 4 of its 12 samples(.|\n)*drop_last=True"):
            train()
    three.loop.close()


def test_a_save_in_the_middle_of_an_accumulation(directory: Path) -> None:
    two = Tried(directory, accumulation=2)
    for _ in two.loop:
        with pytest.raises(StateError, match="in the middle of a step"):
            two.loop.save()
        break
    two.loop.close()


def test_forgotten_load_and_another_directory(directory: Path, tried: Tried, capfd: pytest.CaptureFixture[str]) -> None:
    tried.train_one()
    tried.loop.save()
    tried.loop.close()
    forgetful = Tried(directory)
    with pytest.raises(UsageError, match=r"did not load a checkpoint(.|\n)*loop\.load\(\)"):
        forgetful.train_one()
    assert forgetful.loop.step == 0
    forgetful.loop.close()
    said = capfd.readouterr()
    assert "goes back" not in said.out + said.err
    other = Tried(directory.with_name("other"))
    assert other.loop.load() is None
    found = other.loop.load(directory)
    assert found is not None and (found.step, found.samples) == (1, 4)
    other.train_one()
    other.loop.save()
    assert other.loop.step == 2
    other.loop.close()
    wrong = Tried(directory.with_name("third"))
    wrong.train_one()
    wrong.loop.save()
    wrong.loop.close()
    again = Tried(directory)
    again.loop.load(directory.with_name("third"))
    # Of this directory: the cause is not that nothing was loaded.
    with pytest.raises(UsageError, match=r"did not load a checkpoint(.|\n)*global_step1 was loaded, from .*third"):
        again.train_one()
    again.loop.close()


def test_the_working_directory_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tried = Tried(Path("run"))
    tried.train_one()
    tried.loop.save()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tried.train_one()
    tried.loop.save()
    with pytest.raises(UsageError, match="relative directory of checkpoints"):
        tried.loop.load("run")
    tried.loop.close()
    newest = choose(tmp_path / "run")
    assert newest is not None and newest.iteration == 2 and not list((tmp_path / "elsewhere").iterdir())


def test_a_directory_that_has_the_time_of_the_start_in_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("sts-2026-11-27_10-00-00", "seed-1", "sts-2026-11-27_10-30-00", "seed-2"):
        one = Tried(tmp_path / name)
        one.loop.load()
        one.train_one()
        one.loop.save()
        one.loop.close()
    (said,) = [record.getMessage() for record in caplog.records if "a run is in" in record.getMessage()]
    assert f"{tmp_path / 'sts-2026-11-27_10-00-00'}: " in said


def test_a_run_that_goes_back_says_so(directory: Path, tried: Tried, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        tried.train_one()
        tried.loop.save()
    tried.loop.close()
    for tag, words in (("global_step1", ["megaresume: the run goes back: step 3 -> 1"]), (None, [])):
        again = Tried(directory)
        again.loop.load(tag=tag)
        again.train_one()
        again.loop.save()
        again.loop.close()
        said = capfd.readouterr().out.splitlines()
        assert [line for line in said if "goes back" in line] == words


def test_a_state_that_no_resume_could_read_is_not_saved(
    directory: Path, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried.loop.load()
    tried.train_one()
    tried.loop.save()

    def refuse(*_: Any) -> None:
        raise StateError("no resume could read this")

    monkeypatch.setattr(type(tried.loop.steps.feed), "read_back", refuse)
    tried.train_one()
    with pytest.raises(StateError, match="no resume could read this"):
        tried.loop.save()
    choice = choose(directory)
    assert choice is not None and choice.tag == "global_step1"


def test_the_end_is_in_the_ledger_and_the_lock_is_free(directory: Path, tried: Tried) -> None:
    tried.loop.load()
    tried.train_one()
    tried.loop.save()
    assert [entry.kind for entry in read_ledger(ledger_path(directory)).entries if entry.kind == "finished"] == []
    holder = holder_of(directory)
    assert holder is not None and holder.status != "released"
    tried.loop.finish()
    last = [entry for entry in read_ledger(ledger_path(directory)).entries if entry.kind == "finished"]
    assert [(entry.iteration, entry.samples) for entry in last] == [(1, 4)]
    holder = holder_of(directory)
    assert holder is not None and holder.status == "released"


def test_items_are_not_shown_as_tokens(directory: Path, tried: Tried, capsys: pytest.CaptureFixture[str]) -> None:
    tried.train_one()
    tried.loop.save()
    for words in (["inspect", str(directory)], ["top", str(directory), "--once"]):
        capsys.readouterr()
        assert main(words) == 0
        out = capsys.readouterr().out
        assert "tokens" not in out and re.search(r"source +(weight .*)?items", out), out
        assert words[0] == "top" or (re.search(r"\n  items +4\n", out) and "of 1 rank, digest" in out), out


def test_a_load_says_what_it_has_compared(directory: Path, tried: Tried, capfd: pytest.CaptureFixture[str]) -> None:
    tried.train_one()
    tried.loop.save()
    tried.loop.close()
    path = manifest_path(directory, 1, "global_step1")
    whole = read_manifest(path)
    assert whole.has_checksums and whole.durable

    def said() -> str:
        capfd.readouterr()
        again = Tried(directory)
        again.loop.load()
        again.loop.close()
        (line,) = [line for line in capfd.readouterr().out.splitlines() if "compared" in line]
        return line.removeprefix("megaresume: ")

    num = len(whole.files)
    assert said() == f"checksums compared: {num} files of global_step1"
    # As a process leaves large files that is killed right after the save; then with small ones beside them.
    without = tuple(replace(entry, checksum=None) for entry in whole.files)
    path.write_bytes(replace(whole, files=without, durable=False, boots=(boot_id(),)).to_bytes())
    assert said().startswith("checksums not compared: the run ended before those of global_step1 were taken; sizes")
    path.write_bytes(replace(whole, files=(whole.files[0], *without[1:]), durable=False, boots=(boot_id(),)).to_bytes())
    assert said().startswith(f"checksums compared: 1 of {num} files of global_step1; the run ended before")


def test_what_is_fine(directory: Path, tried: Tried) -> None:
    """A batch left over at the end; saves of one step, and loads, one after the other."""
    for batch in tried.loop:
        if tried.loop.step == 3:
            break
        tried.train(batch)
    tried.loop.save()
    tried.loop.save()
    found = tried.loop.load()
    assert found is not None and (found.step, found.samples) == (3, 12)
    assert tried.loop.load(tag="global_step3") is not None
    tried.train_one()
    assert tried.loop.samples == 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"objects": {"model": 3}}, "'model' cannot be saved"),
        ({"objects": {"optimizers": [3]}}, r"list(.|\n)*'optimizers 0': optimizers\[0\]"),
        ({"objects": {"megaresume": torch.nn.Linear(1, 1)}}, "under another name"),
        ({"objects": {}}, "no model to save"),
        ({"objects": {"m": torch.nn.LazyLinear(1)}}, r"found: *weight, bias, which the first forward"),
        ({"objects": {"m": torch.nn.Linear(1, 1), "o": torch.optim.SGD([torch.ones(1)])}}, "no single module of"),
        ({"loader": torch.utils.data.DataLoader(Numbers())}, "a loader of megaresume's"),
        ({"loader": Numbers()}, "a loader of megaresume's"),
        (
            {"loader": megaresume.DataLoader(Numbers(), dp_rank=0, dp_size=2)},
            "do not cover all(.|\n)*process 0: 0 of 2\n",
        ),
        ({"writer": "pickle"}, "unknown writer"),
        ({"checkpoints": Checkpoints()}, "no save_dir"),
    ],
)
def test_refused(directory: Path, change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "loader": megaresume.DataLoader(Numbers(), batch_size=4),
        "objects": {"model": torch.nn.Linear(1, 1)},
        "checkpoints": Checkpoints(save_dir=directory),
        "writer": "dcp",
    } | change
    with pytest.raises(UsageError, match=words):
        megaresume.attach(given["objects"], given["loader"], checkpoints=given["checkpoints"], writer=given["writer"])


def test_a_layer_that_is_replaced(directory: Path, tried: Tried) -> None:
    """Its optimizer goes on with the parameters of the old one."""
    tried.train_one()
    tried.loop.save()
    tried.model.weight = torch.nn.Parameter(torch.zeros_like(tried.model.weight))
    tried.train_one()
    with pytest.raises(UsageError, match=r"no single module of the loop has all parameters(.|\n)*got a new layer"):
        tried.loop.save()


def test_processes_of_a_launcher_without_a_group(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = megaresume.DataLoader(Numbers(), dp_rank=0, dp_size=1)
    with pytest.raises(UsageError, match=r"train the whole dataset by itself(.|\n)*init_process_group"):
        megaresume.attach({"model": torch.nn.Linear(1, 1)}, loader, checkpoints=Checkpoints(save_dir=directory))


def test_other_objects_than_were_saved(directory: Path, tried: Tried) -> None:
    tried.train_one()
    tried.loop.save()
    tried.loop.close()
    other = Tried(directory)
    other.loop.host.objects.names.append("scheduler")
    with pytest.raises(StateError, match=r"holds other objects(.|\n)*found: *model, optimizer"):
        other.loop.load()
    with pytest.raises(StateError, match="holds other objects"):  # caught, and trained on
        other.train_one()
    other.loop.close()


@pytest.mark.parametrize("writer", ["dcp", "torch"])
@pytest.mark.parametrize("change", ["more", "fewer", "wider"])
def test_another_model_than_was_saved(directory: Path, writer: str, change: str) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    checkpoints = Checkpoints(save_dir=directory)
    loop = megaresume.attach({"model": model}, megaresume.DataLoader(Numbers()), checkpoints=checkpoints, writer=writer)
    for _ in loop:
        loop.stepped()
        break
    loop.save()
    loop.close()
    if change == "fewer":
        del model["b"]
    else:
        model["c" if change == "more" else "b"] = torch.nn.Linear(2, 3)
    loop = megaresume.attach({"model": model}, megaresume.DataLoader(Numbers()), checkpoints=checkpoints)
    words = {
        "more": r"not the one(.|\n)*model\.c\.bias, model\.c\.weight: not in the checkpoint",
        "fewer": r"not the one(.|\n)*model\.b\.bias, model\.b\.weight: in the checkpoint alone",
        "wider": r"cannot be read(.|\n)*the model, or its config, was changed",
    }
    with pytest.raises(CheckpointError if change == "wider" else StateError, match=words[change]):
        loop.load()
    loop.close()


# In the background


@pytest.fixture
def slow(directory: Path) -> Iterator[Tried]:
    one = Tried(directory, writer="dcp_async")
    yield one
    one.loop.close()


def test_a_save_in_the_background_counts_after_its_last_byte(
    slow: Tried, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.train_one()
    slow.loop.save()
    slow.loop.host.settle()
    held, write = threading.Event(), torch.save

    def wait_and_save(*args: Any, **more: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert held.wait(600)
        write(*args, **more)

    monkeypatch.setattr(torch, "save", wait_and_save)
    slow.train_one()
    saved = slow.model.weight.detach().clone()
    slow.loop.save()
    slow.train_one()  # while it is written
    assert not torch.equal(saved, slow.model.weight)
    choice = choose(directory)
    assert choice is not None and choice.tag == deepspeed_tag(1)
    held.set()
    assert slow.loop.host.background._flight is not None
    slow.loop.host.background._flight[0].result()
    slow.train_one()  # notices it
    choice = choose(directory)
    assert choice is not None and choice.tag == deepspeed_tag(2)
    found = slow.loop.load()
    assert found is not None and found.samples == 8
    assert torch.equal(saved, slow.model.weight)


def test_a_save_in_the_background_that_fails(slow: Tried, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow.train_one()
    slow.loop.save()
    slow.loop.host.settle()

    write = torch.save

    def fail(*args: Any, **more: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        write(*args, **more)

    monkeypatch.setattr(torch, "save", fail)
    slow.train_one()
    slow.loop.save()
    with pytest.raises(CheckpointError, match=r"global_step2 could not be written(.|\n)*No space left"):
        slow.loop.save()
    choice = choose(directory)
    assert choice is not None and choice.tag == deepspeed_tag(1)


class LateLoader(megaresume.DataLoader):
    """Comes back one batch after the place that its state says."""

    def restore(self, state: StreamState) -> None:
        super().restore(state)
        self.rewind(state.samples + self.batch_size)


@pytest.mark.parametrize("batch_size", [4, 2])
def test_a_loader_that_comes_back_at_another_place(
    tried: Tried, directory: Path, batch_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tried.train_one()
    tried.loop.save()
    tried.loop.close()

    def resumed(loader: megaresume.DataLoader) -> Loop:
        objects = {"model": tried.model, "optimizer": tried.optimizer}
        return megaresume.attach(objects, loader, checkpoints=Checkpoints(save_dir=directory))  # type: ignore[no-any-return]

    late = resumed(LateLoader(Numbers(), batch_size=batch_size))
    with pytest.raises(StateError, match="did not come back to the place") as error:
        late.load()
    assert f"sample {4 + batch_size} next" in str(error.value) and "sample 4, by the count" in str(error.value)
    with pytest.raises(StateError, match="did not come back to the place"):
        next(iter(late))
    late.close()
    loop = resumed(megaresume.DataLoader(Numbers(), batch_size=batch_size))
    loop.load()
    loop.close()
    line = "repeated 0 skipped 0 | step 1 from global_step1 | random state restored | position checked with the count"
    assert line in capsys.readouterr().out
