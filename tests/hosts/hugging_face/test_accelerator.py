"""`megaresume.attach` in real loops with Accelerate, on gloo: killed, and resumed.

What a loop trained it writes down itself: `accelerated.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import torch
import transformers
from accelerate.utils import DataLoaderConfiguration, DistributedType, GradientAccumulationPlugin, ProjectConfiguration

import megaresume
from megaresume.checkpoint.load.choose import choose
from megaresume.hosts import accelerate as accelerate_host
from megaresume.hosts import steps
from megaresume.hosts.accelerate import warn_of_length
from megaresume.program import main
from megaresume.stream.errors import StateError, UsageError
from tests.hosts.conftest import write_corpus
from tests.hosts.hugging_face.accelerated import accelerator_of, run
from tests.hosts.torch.program import Numbers
from tests.hosts.torch.record import items, launch_forked, trained
from tests.hosts.torch.test_unsaved import Average

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("accelerated.py")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs with one rank, which nobody stops."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(directory, save_every=50)
    return directory


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two ranks, killed in the second epoch: rank 0 in the middle of the save of step 24."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    status, output = launch_forked(PROGRAM, directory, 2, batch=2, save_every=8, kill=("save", 24))
    assert status == -signal.SIGKILL, output[-3000:]
    assert (directory / "checkpoints" / "checkpoint-24").is_dir()
    return directory


def test_two_ranks_to_one_with_workers(copy: Path, order: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    run(copy, attempt=2, save_every=50, batch=2, accumulation=4, num_workers=2)
    said = capfd.readouterr().out
    assert "gbs 8->8 | repeated 0 skipped 0 | step 16 from checkpoint-16 | random state reseeded" in said
    assert items(trained(copy)) == order
    root = copy / "checkpoints"
    assert main(["verify", str(root)]) == 0
    assert main(["latest", str(root)]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == str(root / "checkpoint-38")


def test_a_state_that_differs_between_ranks_is_named_once(tmp_path: Path) -> None:
    """Rank 0's is saved."""
    status, output = launch_forked(PROGRAM, tmp_path / "run", 2, steps=2, save_every=1, mistake="differs")
    assert status == 0, output[-3000:]
    (line,) = (line for line in output.splitlines() if "WARNING: the state of" in line)
    assert "'Held (1)' is another one on rank 1, and checkpoints hold one for all ranks" in line


def test_total_limit_counts_complete_ones(tmp_path: Path) -> None:
    run(tmp_path / "run", save_every=13, limit=2)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("checkpoint-*"))
    assert names == ["checkpoint-26", "checkpoint-38"]


def test_packed_text_and_a_checkpoint_by_its_path(tmp_path: Path) -> None:
    write_corpus(tmp_path / "web", documents=200, seed=1)
    (tmp_path / "data.yaml").write_text("seed: 7\nseq_length: 32\nsources:\n  web: {path: web}\n")
    directory, text = tmp_path / "run", str(tmp_path / "data.yaml")
    run(directory, data=text, steps=6, save_every=3)
    third = str(directory / "checkpoints" / "checkpoint-3")
    run(directory, attempt=2, data=text, steps=9, batch=2, accumulation=1, load=third)
    assert items(trained(directory)) == list(range(36))
    assert [len(step) for step in trained(directory)] == [8] * 3 + [2] * 6


# Bad habits


class Tried:
    """A loop with Accelerate."""

    def __init__(self, directory: Path, *, accumulation: int = 1, **options: Any) -> None:
        self.accelerator = accelerator_of(directory, accumulation, **options)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.loader = megaresume.DataLoader(Numbers(), batch_size=4, accumulation=accumulation)
        self.loop = megaresume.attach(self.accelerator, self.loader)

    def train(self, batch: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch.float()).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()


def pass_over(t: Tried) -> None:
    for number, batch in enumerate(t.loop):
        if number != 3:
            t.train(batch)


def train_twice(t: Tried) -> None:
    for batch in t.loop:
        t.train(batch)
        t.train(batch)


def read_the_loader(t: Tried) -> None:
    for batch in t.loader:
        t.train(batch)


def evaluate_with_the_loop(t: Tried) -> None:
    for batch in t.loop:
        t.train(batch)
        break
    for batch in t.loop:
        t.model(batch.float())


def save_before_the_step(t: Tried) -> None:
    for batch in t.loop:
        t.accelerator.save_state()
        t.train(batch)


def step_past_the_accelerator(t: Tried) -> None:
    for batch in t.loop:
        t.accelerator.backward(t.model(batch.float()).sum())
        t.optimizer.optimizer.step()
        break
    t.accelerator.save_state()


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        (pass_over, "taken and not trained(.|\n)*samples 12 to 15 taken since step 3"),
        (train_twice, "no micro-batch was taken for it"),
        (read_the_loader, "no micro-batch was taken for it"),
        (evaluate_with_the_loop, "taken and not trained"),
        (save_before_the_step, "in the middle of a step"),
        (step_past_the_accelerator, r"in the middle of a step(.|\n)*by accelerator\.prepare"),
    ],
)
def test_stopped(tmp_path: Path, habit: Callable[[Tried], None], words: str) -> None:
    tried = Tried(tmp_path / "run")
    with pytest.raises(StateError, match=words):
        habit(tried)
    with pytest.raises(StateError):  # and nothing is saved
        tried.accelerator.save_state()
    assert choose(tmp_path / "run" / "checkpoints") is None
    tried.loop.close()


def test_a_save_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    tried = Tried(tmp_path / "run", accumulation=4)
    for number, batch in enumerate(tried.loop):
        tried.train(batch)
        if number == 5:
            with pytest.raises(StateError, match=r"in the middle(.|\n)*samples 16 to 19, samples 20 to 23 taken"):
                tried.accelerator.save_state()
            break
    tried.loop.close()


def test_a_save_after_a_for_that_was_left_within_an_accumulation(tmp_path: Path) -> None:
    """Accelerate saves how far it is in the accumulation; a resume begins with the first micro-batch of the step."""
    tried = Tried(tmp_path / "run", accumulation=4)
    for number, batch in enumerate(tried.loop):
        tried.train(batch)
        if number == 5:
            break
    tried.accelerator.save_state()
    tried.loop.close()
    again = Tried(tmp_path / "run", accumulation=4)
    again.accelerator.load_state()
    taken = 0
    for batch in again.loop:
        again.train(batch)
        taken += 1
        if again.loop.step == 3:
            break
    assert taken == 8 and again.loop.samples == 48
    again.loop.close()


def test_two_optimizers_of_one_step(tmp_path: Path) -> None:
    accelerator = accelerator_of(tmp_path / "run", 1)
    model = torch.nn.Linear(2, 1)
    made = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    model, one, other = accelerator.prepare(model, *made)
    loop = megaresume.attach(accelerator, megaresume.DataLoader(Numbers(), batch_size=4))
    for batch in loop:
        accelerator.backward(model(batch.float()).sum())
        one.step()
        other.step()
        if loop.step == 3:
            break
    accelerator.save_state()
    with pytest.raises(StateError, match="no micro-batch was taken"):
        other.step()
    loop.close()


def test_other_places_and_names(tmp_path: Path) -> None:
    tried = Tried(tmp_path / "run")
    root = tmp_path / "run" / "checkpoints"
    tried.accelerator.load_state()  # there is none
    for batch in tried.loop:
        tried.train(batch)
        if tried.loop.step == 2:
            break
    tried.accelerator.save_state()
    tried.accelerator.save_state()
    tried.accelerator.project_configuration.automatic_checkpoint_naming = False
    with pytest.raises(UsageError, match="must be in one directory"):
        tried.accelerator.save_state(str(tmp_path / "elsewhere"))
    tried.accelerator.save_state(str(root / "best"))
    for batch in tried.loop:
        tried.train(batch)
        break
    with pytest.raises(UsageError, match=r"another step has this name(.|\n)*holds step 2, at step 3"):
        tried.accelerator.save_state(str(root / "best"))
    tried.accelerator.load_state(str(root / "best"))
    assert tried.loop.step == 2
    tried.loop.close()


@pytest.mark.parametrize("of", ["the optimizer", "the prepared optimizer"])
def test_a_scheduler_that_is_in_no_checkpoint(tmp_path: Path, of: str) -> None:
    accelerator = accelerator_of(tmp_path, 1)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    prepared = accelerator.prepare(optimizer)
    loop = megaresume.attach(accelerator, megaresume.DataLoader(Numbers(), batch_size=4))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer if of == "the optimizer" else prepared, 1)
    with pytest.raises(UsageError, match=r"start afresh(.|\n)*accelerator\.prepare\(scheduler\)"):
        next(iter(loop))
    accelerator._custom_objects.insert(0, scheduler)  # as register_for_checkpointing before attach
    next(iter(loop))
    loop.close()


def test_an_optimizer_within_another_one(tmp_path: Path) -> None:
    accelerator = accelerator_of(tmp_path, 1)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    optimizer.inner = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1, momentum=0.9)  # type: ignore[attr-defined]
    accelerator.prepare(optimizer)
    loop = megaresume.attach(accelerator, megaresume.DataLoader(Numbers(), batch_size=4))
    next(iter(loop))
    for one in optimizer.param_groups[0]["params"]:
        one.grad = torch.ones_like(one)
    optimizer.inner.step()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"inside another one(.|\n)*register_for_checkpointing"):
        loop.host.check_first_save()
    accelerator._custom_objects.insert(0, optimizer.inner)  # type: ignore[attr-defined]  # as before attach
    loop.host.check_first_save()
    loop.close()


@pytest.mark.parametrize(("length", "times", "warned"), [(30, 2, True), (60, 2, False), (30, 1, False), (29, 2, False)])
def test_a_schedule_that_is_planned_for_the_steps_of_one_rank(
    length: int, times: int, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    for scheduler in (
        transformers.get_cosine_schedule_with_warmup(optimizer, 0, length),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=length),
    ):
        warn_of_length(scheduler, 30, times)
        assert ("over after 15" in capsys.readouterr().out) == warned


@pytest.mark.parametrize("epochs", [None, 2])
def test_a_loop_says_how_long_it_is(tmp_path: Path, epochs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(accelerate_host, "warn_of_length", lambda _, steps, times: said.append((steps, times)))
    accelerator = accelerator_of(tmp_path, 2)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    loader = megaresume.DataLoader(Numbers(), batch_size=4, accumulation=2, max_epochs=epochs)
    megaresume.attach(accelerator, loader).close()
    assert said == ([] if epochs is None else [(epochs * -(-len(Numbers()) // 8), 1)])


def test_what_comes_after_attach(tmp_path: Path) -> None:
    tried = Tried(tmp_path / "run")
    for one in (tried.loader, tried.loop):
        with pytest.raises(UsageError, match="prepare is not for this loader"):
            tried.accelerator.prepare(one)
        with pytest.raises(UsageError, match="skip_first_batches is not for this loader"):
            tried.accelerator.skip_first_batches(one, 2)
    other = torch.nn.Linear(1, 1)
    tried.accelerator.prepare(torch.utils.data.DataLoader(Numbers(4)))  # for an evaluation
    with pytest.raises(UsageError, match="already"):
        megaresume.attach(tried.accelerator, tried.loader)
    tried.accelerator.register_for_checkpointing(other)
    with pytest.raises(UsageError, match="registered for checkpointing after"):
        tried.accelerator.save_state()
    tried.accelerator._custom_objects.pop()
    tried.accelerator.prepare(other, torch.optim.SGD(other.parameters()))
    with pytest.raises(UsageError, match=r"prepared or removed after megaresume\.attach"):
        tried.accelerator.load_state()
    tried.loop.close()


def trained_to(directory: Path, step: int) -> Tried:
    """A loop that has trained so many steps, and another one that was loaded from its checkpoint."""
    tried = Tried(directory)
    for batch in tried.loop:
        tried.train(batch)
        if tried.loop.step == step:
            break
    tried.accelerator.save_state()
    tried.loop.close()
    again = Tried(directory)
    again.accelerator.load_state()
    return again


def test_a_loop_that_skips_what_it_has_trained(tmp_path: Path) -> None:
    again = trained_to(tmp_path / "run", 3)
    assert again.accelerator.skip_first_batches(again.loop, 3) is again.loop
    batches = iter(again.accelerator.skip_first_batches(again.loop, 3))
    again.train(next(batches))
    with pytest.raises(UsageError, match="skip_first_batches is not for this loader"):
        again.accelerator.skip_first_batches(again.loop, 1)
    batches.close()
    again.loop.close()


def test_a_loop_that_passes_over_what_it_has_trained(tmp_path: Path) -> None:
    again = trained_to(tmp_path / "run", 3)
    with pytest.raises(StateError, match=r"trained before the resume(.|\n)*the first batch is the one after step 3"):
        for number, batch in enumerate(again.loop):
            if number >= 3:
                again.train(batch)
    again.loop.close()


def test_a_program_that_ends_within_a_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(tmp_path / "run")
    batches = iter(tried.loop.steps)
    tried.train(next(batches))
    for name in ("StateError", "UsageError"):  # as the end of the interpreter does to modules
        monkeypatch.setattr(steps, name, None)
    batches.close()
    tried.loop.close()


def test_what_programs_ask_a_loader_for(tmp_path: Path) -> None:
    tried = Tried(tmp_path / "run")
    tried.loop.sampler.set_epoch(0)
    assert tried.loop.dataset is tried.loader.dataset and tried.loop.batch_size == 4
    assert not hasattr(tried.loop, "state_dict")  # its state is in the checkpoint
    assert len(tried.loop) == len(tried.loader) == 25 and tried.loop.epoch == 0
    for batch in tried.loop:
        tried.train(batch)
    assert tried.loop.epoch == tried.loader.epoch == 1
    tried.loop.close()


@pytest.mark.parametrize("written", [True, False])
def test_a_program_that_writes_its_model_itself(
    tmp_path: Path, written: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """As diffusers' examples do, by hooks of Accelerate, which make a model in order to save an average of the weights:
    the checkpoint has no weights where it has them otherwise.
    """

    class Hooked(Tried):
        def __init__(self) -> None:
            super().__init__(tmp_path / "run")
            self.average = Average(self.model.parameters())
            self.accelerator.register_save_state_pre_hook(self.write if written else self.write_model)
            self.accelerator.register_load_state_pre_hook(self.read)

        def write(self, models: list[torch.nn.Module], weights: list[Any], directory: str) -> None:
            torch.save(self.average.state_dict(), Path(directory) / "average.pt")
            write_model(models, weights, directory)

        write_model = staticmethod(lambda *given: write_model(*given))

        def read(self, models: list[torch.nn.Module], directory: str) -> None:
            torch.nn.Linear(2, 1)  # draws its weights
            models.pop().load_state_dict(torch.load(Path(directory) / "mine.pt"))

    def write_model(models: list[torch.nn.Module], weights: list[Any], directory: str) -> None:
        torch.nn.Linear(2, 1)
        torch.save(weights.pop(), Path(directory) / "mine.pt")

    tried = Hooked()
    batches = iter(tried.loop)
    tried.train(next(batches))
    tried.average.update(tried.model.parameters())
    capfd.readouterr()
    tried.accelerator.save_state()
    weights = [one.detach().clone() for one in tried.model.parameters()]
    next(batches)
    drawn = torch.rand(1)  # by the next step
    tried.loop.close()
    said = capfd.readouterr().out
    assert ("no checkpoint holds the state of tests.hosts.torch.test_unsaved.Average" in said) == (not written)
    assert "random numbers were drawn" not in said
    again = Hooked()
    again.accelerator.load_state()
    assert again.loop.step == 1
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), weights, strict=True))
    next(iter(again.loop))
    assert torch.equal(torch.rand(1), drawn)
    again.loop.close()


def test_a_loader_that_is_prepared_before(tmp_path: Path) -> None:
    accelerator = accelerator_of(tmp_path / "run", 1)
    model, loader = torch.nn.Linear(2, 1), megaresume.DataLoader(Numbers(), batch_size=4)
    model, _, same = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert same is loader
    megaresume.attach(accelerator, loader).close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataloader_config": DataLoaderConfiguration(split_batches=True)}, "split_batches"),
        ({"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}, "dispatch_batches"),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)},
            "sync_with_dataloader",
        ),
    ],
)
def test_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Tried(tmp_path / "run", **options)


@pytest.mark.parametrize("kind", ["MEGATRON_LM", "XLA"])
def test_other_ways_to_train_on_several_devices_are_refused(tmp_path: Path, kind: str) -> None:
    accelerator = accelerator_of(tmp_path / "run", 1)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.state.distributed_type = DistributedType(kind)
    with pytest.raises(UsageError, match=f"this way of training on several devices(.|\n)*{kind}(.|\n)*FSDP2"):
        megaresume.attach(accelerator, megaresume.DataLoader(Numbers(), batch_size=4))


def test_refused_before_anything_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, loader = accelerator_of(tmp_path / "run", 1), megaresume.DataLoader(Numbers(), batch_size=4)
    with pytest.raises(UsageError, match="nothing is prepared yet"):
        megaresume.attach(accelerator, loader)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(UsageError, match="a loader of megaresume's"):
        megaresume.attach(accelerator, torch.utils.data.DataLoader(Numbers()))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the same number"):
        megaresume.attach(accelerator, megaresume.DataLoader(Numbers(), batch_size=4, accumulation=2))
    with pytest.raises(UsageError, match=r"rank 0 of 2; the Accelerator's is rank 0 of 1"):
        megaresume.attach(accelerator, megaresume.DataLoader(Numbers(), batch_size=4, dp_rank=0, dp_size=2))
    with (
        monkeypatch.context() as launched,
        pytest.raises(UsageError, match=r"by WORLD_SIZE, Accelerator\.num_processes 1"),
    ):
        launched.setenv("WORLD_SIZE", "2")
        megaresume.attach(accelerator, loader)
    with pytest.raises(UsageError, match="has no adopt"):
        megaresume.attach(accelerator, loader, adopt=True)
    accelerator.project_configuration = ProjectConfiguration()
    with pytest.raises(UsageError, match=r"ProjectConfiguration\(project_dir"):
        megaresume.attach(accelerator, loader)
