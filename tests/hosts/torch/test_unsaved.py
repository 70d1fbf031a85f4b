"""A learning rate continues where it was, or the run does not begin; what else a checkpoint lacks is named. In this
process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megaresume
from megaresume.hosts.unsaved import warn_of_scheduler
from megaresume.stream.errors import UsageError
from tests.hosts.torch.program import Numbers

STOP, END = 3, 8


class Run:
    """A model, its optimizer, and the rates that it is trained at."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        model = torch.nn.Linear(2, 1)
        self.objects: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}

    def attach(self) -> None:
        loader = megaresume.DataLoader(Numbers(), batch_size=4)
        self.loop = megaresume.attach(self.objects, loader, checkpoints=self.directory)

    def scheduler(self) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(self.objects["optimizer"], lambda n: 1 / (1 + n))

    def step_and_save(self) -> None:
        next(iter(self.loop))
        self.objects["optimizer"].step()
        self.loop.stepped()
        self.loop.save()

    def train(self, scheduler: Any, stop: int) -> list[float]:
        rates = []
        for _ in self.loop:
            rates.append(self.objects["optimizer"].param_groups[0]["lr"])
            self.objects["optimizer"].step()
            scheduler.step()
            self.loop.stepped()
            if self.loop.step == stop:
                break
        self.loop.save()
        self.loop.close()
        return rates

    def warned_at_save(self, capfd: pytest.CaptureFixture[str]) -> list[str]:
        """Save, and end; the lines about what no checkpoint holds."""
        capfd.readouterr()
        self.loop.save()
        self.loop.close()
        return [line for line in capfd.readouterr().out.splitlines() if "no checkpoint holds" in line]


def test_a_rate_continues(tmp_path: Path) -> None:
    rates: list[float] = []
    for stop in (STOP, END):
        run = Run(tmp_path)
        scheduler = run.objects["scheduler"] = run.scheduler()
        run.attach()
        run.loop.load()
        rates += run.train(scheduler, stop)
    assert rates == pytest.approx([1 / (1 + n) for n in range(END)])


@pytest.mark.parametrize("when", ["before attach", "after the load"])
def test_a_rate_that_would_begin_anew_is_refused(tmp_path: Path, when: str) -> None:
    run = Run(tmp_path)
    scheduler = run.scheduler() if when == "before attach" else None
    run.attach()
    run.loop.load()
    scheduler = scheduler or run.scheduler()
    with pytest.raises(UsageError, match=r"start afresh(.|\n)*SGD with a scheduler(.|\n)*'scheduler': scheduler"):
        next(iter(run.loop))
    run.loop.close()


def test_one_that_is_gone_is_of_no_interest(tmp_path: Path) -> None:
    """As that of a search for the first rate: it leaves its mark in the optimizer."""
    run = Run(tmp_path)
    gc.collect()
    gc.disable()
    scheduler = run.scheduler()
    scheduler.step()
    scheduler.itself = scheduler  # until it is collected
    del scheduler
    gc.enable()
    run.attach()
    run.loop.load()
    next(iter(run.loop))
    run.loop.save()
    run.loop.close()


@pytest.mark.parametrize("kept", [None, "by name", "by what holds it"])
def test_a_plateau_that_would_begin_anew_is_refused(tmp_path: Path, kept: str | None) -> None:
    """It leaves no trace in its optimizer."""

    class State:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

        def state_dict(self) -> Any:
            return self.scheduler.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.scheduler.load_state_dict(state)

    run = Run(tmp_path)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(run.objects["optimizer"])
    if kept is not None:
        run.objects["scheduler"] = scheduler if kept == "by name" else State(scheduler)
    run.attach()
    run.loop.load()
    next(iter(run.loop))
    if kept is None:
        with pytest.raises(UsageError, match=r"start afresh(.|\n)*SGD with a scheduler"):
            run.loop.save()
    else:
        run.loop.save()
    run.loop.close()


@pytest.mark.parametrize("kept", ["another", "both", "in a chain", "in a sequence"])
def test_a_warm_up_beside_the_scheduler_that_is_saved(tmp_path: Path, kept: str) -> None:
    """torchvision's references for detection make one in the function of the first epoch."""
    rates = torch.optim.lr_scheduler
    run = Run(tmp_path)
    optimizer = run.objects["optimizer"]
    before = rates.ExponentialLR(optimizer, 1.1)  # of a search for the first rate
    before.step()
    warm_up = rates.LinearLR(optimizer, 0.1, total_iters=4)
    steps = rates.MultiStepLR(optimizer, [100])
    stepped = [warm_up]
    if kept == "in a sequence":
        stepped = [rates.SequentialLR(optimizer, [rates.ChainedScheduler([warm_up]), steps], [4])]
    elif kept == "in a chain":
        stepped = [rates.ChainedScheduler([warm_up, steps])]
    run.objects["scheduler"] = steps if stepped == [warm_up] else stepped[0]
    if kept == "both":
        run.objects["warm_up"] = warm_up
    run.attach()
    run.loop.load()
    next(iter(run.loop))
    optimizer.step()
    stepped[0].step()
    run.loop.stepped()
    if kept == "another":
        with pytest.raises(
            UsageError, match=r"start afresh(.|\n)*SGD with a LinearLR in addition to the scheduler that is saved"
        ):
            run.loop.save()
    else:
        run.loop.save()
    run.loop.close()


class Plateau:
    """As timm's: the scheduler inside it counts, and its state has only its best value."""

    def __init__(self, scheduler: Any, *, counts: bool) -> None:
        self.scheduler, self.counts = scheduler, counts

    def state_dict(self) -> Any:
        return {"inner": self.scheduler.state_dict()} if self.counts else {"best": self.scheduler.best}

    def load_state_dict(self, state: Any) -> None:
        """Nothing that this test looks at."""


@pytest.mark.parametrize("given", ["alone", "with the inner one", "with its state"])
def test_a_scheduler_inside_one_that_leaves_its_state_out(
    tmp_path: Path, given: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    inner = torch.optim.lr_scheduler.ReduceLROnPlateau(run.objects["optimizer"])
    run.objects["scheduler"] = Plateau(inner, counts=given == "with its state")
    if given == "with the inner one":
        run.objects["inner"] = inner
    run.attach()
    run.loop.load()
    run.step_and_save()
    run.loop.close()
    said = [line for line in capfd.readouterr().out.splitlines() if "no checkpoint holds" in line]
    assert ["ReduceLROnPlateau" in line for line in said] == [True] * (given == "alone")


@pytest.mark.parametrize("held", [lambda one: [one], lambda one: {"rate": one}], ids=["in a list", "in a mapping"])
def test_one_that_an_object_holds_is_known(tmp_path: Path, held: Any) -> None:
    """As programs with several optimizers hold their schedulers."""

    class State:
        def __init__(self, schedulers: Any) -> None:
            self.schedulers = schedulers

        def state_dict(self) -> Any:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    run = Run(tmp_path)
    run.objects["schedulers"] = State(held(run.scheduler()))
    run.attach()
    run.loop.load()
    next(iter(run.loop))
    run.loop.close()


@pytest.mark.parametrize("when", ["before the save", "after the save", "after the epoch"])
def test_one_stepped_after_the_save_is_named_once(tmp_path: Path, when: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    scheduler = run.objects["scheduler"] = run.scheduler()
    run.attach()
    run.loop.load()
    said = []
    for _ in range(3):
        for _ in run.loop:
            said.append("was stepped between the save and the next step" in capfd.readouterr().out)
            run.objects["optimizer"].step()
            if when == "before the save":
                scheduler.step()
            run.loop.stepped()
            run.loop.save()
            if when == "after the save":
                scheduler.step()
        if when == "after the epoch":
            scheduler.step()
    run.loop.close()
    steps = len(run.loop)
    first = {"before the save": None, "after the save": 1, "after the epoch": steps}[when]
    assert [number for number, is_said in enumerate(said) if is_said] == ([] if first is None else [first])
    assert len(said) == 3 * steps


class HalfScheduler(torch.optim.lr_scheduler.LRScheduler):
    """As one whose `__init__` failed, and which an error still holds."""

    def __init__(self) -> None:
        pass


class HalfOptimizer(torch.optim.Optimizer):
    def __init__(self) -> None:
        pass


class HalfAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self) -> None:
        pass


class Proxy:
    """It asks what is not there yet."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_objects_that_are_of_no_interest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    others: list[Any] = [HalfScheduler(), HalfOptimizer(), HalfAverage(), Proxy()]
    run = Run(tmp_path)
    owner = Numbers()
    gone = weakref.proxy(owner)
    run.objects["model"].owner = run.objects["optimizer"].owner = gone
    others.append(torch.nn.Sequential(torch.nn.LazyLinear(2)))
    run.objects["other"] = SimpleNamespace(gone=[gone], state_dict=dict, load_state_dict=print)
    del owner
    run.attach()
    run.loop.load()
    run.step_and_save()
    next(iter(run.loop))
    run.loop.close()
    assert len(others) == 5 and "WARNING" not in capfd.readouterr().out


def test_what_was_trained_is_let_go(tmp_path: Path) -> None:
    """When its loop is closed: another one may need the memory."""
    run = Run(tmp_path)
    run.attach()
    run.loop.load()
    run.step_and_save()
    run.loop.close()
    model = weakref.ref(run.objects["model"])
    del run
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("forgotten", ["", "optimizer", "average", "scaler"])
@pytest.mark.parametrize("is_method", [False, True])
def test_what_was_forgotten_is_named(
    tmp_path: Path, forgotten: str, is_method: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    model = run.objects["model"]
    run.objects["optimizer"] = optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    run.objects |= {
        "scheduler": run.scheduler(),
        "average": torch.optim.swa_utils.AveragedModel(model),
        "scaler": torch.amp.GradScaler("cpu"),
    }
    held = dict(run.objects)
    if is_method and forgotten != "optimizer":
        run.objects["optimizer"] = SimpleNamespace(
            state_dict=optimizer.state_dict, load_state_dict=optimizer.load_state_dict
        )
    run.objects.pop(forgotten, None)
    run.attach()
    run.loop.load()
    for batch in run.loop:
        held["scaler"].scale(model(batch.float()).mean()).backward()
        held["scaler"].step(optimizer)
        held["scaler"].update()
        held["average"].update_parameters(model)
        run.loop.stepped()
        if run.loop.step == 2:
            break
    said = run.warned_at_save(capfd)
    named = {"optimizer": "SGD", "average": "AveragedModel", "scaler": "GradScaler"}
    assert len(said) == bool(forgotten)
    assert [name for name in named if said and named[name] in said[0]] == [forgotten] * len(said)


class Center(torch.nn.Module):
    """Of what the teacher says, as DINO's loss has it."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 2))
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.center = self.center * 0.9 + x.mean() * 0.1
        self.last = x.mean()
        return x - self.center[0, 0]


@pytest.mark.parametrize("given", [True, False])
def test_modules_that_steps_change_are_named(tmp_path: Path, given: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """A teacher is an average of the weights, made by hand; a reference does not change; a view has the weights."""
    run = Run(tmp_path)
    model = run.objects["model"]
    teacher, reference = (torch.nn.Sequential(torch.nn.Linear(2, 1)) for _ in range(2))
    view = torch.nn.Linear(2, 1)
    view.weight = torch.nn.Parameter(model.weight.detach())
    center = Center()
    if given:
        run.objects |= {"teacher": teacher, "loss": center}
    run.attach()
    run.loop.load()
    batch = next(iter(run.loop))
    loss = center(model(batch.float()) - reference(batch.float()) - view(batch.float())).mean()
    loss.backward()
    run.objects["optimizer"].step()
    for ours, average in zip(model.parameters(), teacher.parameters(), strict=True):
        average.data.mul_(0.9).add_(ours.detach(), alpha=0.1)
    run.loop.stepped()
    said = run.warned_at_save(capfd)
    assert len(said) == (not given)
    assert given or "the state of tests.hosts.torch.test_unsaved.Center, torch.nn.modules.container.Seq" in said[0]


class Average:
    """As torch_ema's and diffusers': no module."""

    def __init__(self, parameters: Any) -> None:
        self.shadow = [one.detach().clone() for one in parameters]
        self.names = ["weight", "bias"]

    def update(self, parameters: Any) -> None:
        for average, one in zip(self.shadow, parameters, strict=True):
            average.lerp_(one.detach(), 0.1)

    def state_dict(self) -> Any:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: Any) -> None:
        self.shadow = state["shadow"]


@pytest.mark.parametrize("given", ["", "itself", "a method", "not updated"])
def test_an_average_that_is_no_module(tmp_path: Path, given: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    model = run.objects["model"]
    average = Average(model.parameters())
    if given == "itself":
        run.objects["average"] = average
    elif given == "a method":
        run.objects["average"] = SimpleNamespace(state_dict=average.state_dict, load_state_dict=average.load_state_dict)
    run.attach()
    run.loop.load()
    model(next(iter(run.loop)).float()).mean().backward()
    run.objects["optimizer"].step()
    if given != "not updated":
        average.update(model.parameters())
    run.loop.stepped()
    said = run.warned_at_save(capfd)
    assert len(said) == (not given)
    assert given or "the state of tests.hosts.torch.test_unsaved.Average: each" in said[0]


@pytest.mark.parametrize("scores", [{}, {"lora_A": torch.ones(1)}], ids=["not yet", "collected"])
def test_scores_that_peft_moves_ranks_by_are_named(
    tmp_path: Path, scores: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """AdaLoRA's, in an object that its model holds, and AdaMSS's, in the layers."""
    run = Run(tmp_path)
    model = run.objects["model"]
    model.rankallocator = SimpleNamespace(exp_avg_ipt=scores)
    model.exp_avg_ipt_A = {"default": [scores.get("lora_A")]}
    run.attach()
    run.step_and_save()
    named = "torch.nn.modules.linear.Linear, its exp_avg_ipt, types.SimpleNamespace: each resume would"
    assert (named in capfd.readouterr().out) == bool(scores)


def test_a_rate_that_deepspeed_does_not_save_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """It may be in the program's own ``client_state``, so it is not refused."""
    inner = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    engine = SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner, step=print), lr_scheduler=None)

    def said(**client_state: Any) -> bool:
        warn_of_scheduler(engine, client_state)
        return "a learning-rate scheduler that DeepSpeed does not know" in capfd.readouterr().out

    assert not said()
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    assert said()
    assert not said(rates=scheduler.state_dict())
    engine.lr_scheduler = scheduler
    assert not said()


def saved_steps(loop: Any) -> Iterator[Any]:
    """The batches of six steps, each of which is saved."""
    for batch in loop:
        yield batch
        loop.stepped()
        loop.save()
        if loop.step == 6:
            break
    loop.close()


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("zeroed", ["before", "after"])
def test_gradients_that_a_save_lacks_are_named_once(
    tmp_path: Path, every: int, zeroed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """An accumulation that the loader was not told, and steps that a scaler would skip: only the first is named."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = megaresume.DataLoader(Numbers(), batch_size=4, max_epochs=1)
    loop = megaresume.attach({"model": model, "optimizer": optimizer}, loader, checkpoints=tmp_path)
    for batch in saved_steps(loop):
        if zeroed == "before" and (every == 1 or loop.step % every == 0):
            optimizer.zero_grad()
        model(batch.float()).sum().backward()
        if loop.step % 2:
            optimizer.step()
        if zeroed == "after" and (every == 1 or loop.step % every):
            optimizer.zero_grad()
    assert capfd.readouterr().out.count("SGD accumulates gradients across a save") == every - 1


def test_gradients_of_two_optimizers_that_a_save_lacks_are_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As of a generator and a critic: both accumulate across a save, which a start says once."""
    models = {name: torch.nn.Linear(2, 1) for name in ("critic", "maker")}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models.values()]
    loader = megaresume.DataLoader(Numbers(), batch_size=4, max_epochs=1)
    objects = models | {"of critic": optimizers[0], "of maker": optimizers[1]}
    loop = megaresume.attach(objects, loader, checkpoints=tmp_path)
    for batch in saved_steps(loop):
        sum(model(batch.float()).sum() for model in models.values()).backward()
        if loop.step % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert capfd.readouterr().out.count("accumulates gradients across a save") == 1
