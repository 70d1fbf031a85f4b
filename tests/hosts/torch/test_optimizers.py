"""Optimizers without a state, or with that of some parameters, go on as if nobody had stopped. In this process."""

from __future__ import annotations

import functools
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import megaresume
from megaresume import Checkpoints
from megaresume.hosts.optimizer_states import joined
from megaresume.stream.errors import StateError, UsageError
from tests.hosts.torch.program import Numbers

SECOND_HEAD, FIRST_STEP, END = 4, 2, 8


class Run:
    """A model of two heads, in groups of their own in the other order, and the loop around it."""

    def __init__(self, directory: Path, writer: Any, optimizer: Any, *, is_sharded: bool = False) -> None:
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
        for head in self.heads if is_sharded else []:
            fully_shard(head, mesh=init_device_mesh("cpu", (1,)))
        first, second = (head.parameters() for head in self.heads)
        self.optimizer = optimizer([{"params": second}, {"params": first, "lr": 0.05}], lr=0.01)
        loader = megaresume.DataLoader(Numbers(), batch_size=4)
        objects = {"model": self.heads, "optimizer": self.optimizer}
        self.loop = megaresume.attach(objects, loader, checkpoints=Checkpoints(save_dir=directory), writer=writer)

    def train(self, stop: int) -> list[float]:
        """The losses until a step. The second head comes into use late; as a gradient scaler does, leave out steps."""
        losses = []
        for batch in self.loop:
            heads = self.heads if self.loop.step >= SECOND_HEAD else self.heads[:1]
            loss = sum(head(batch.float() / 100).pow(2).mean() for head in heads)
            loss.backward()
            if self.loop.step >= FIRST_STEP:
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.loop.stepped()
            losses.append(loss.item())
            if self.loop.step == stop:
                break
        return losses


class Plain(torch.optim.Optimizer):
    """As Muon is often written: its step takes no closure."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    momentum = self.state[one].setdefault("momentum", torch.zeros_like(one))
                    one.sub_(momentum.mul_(0.9).add_(one.grad), alpha=group["lr"])


@pytest.mark.parametrize("writer", ["dcp", "torch"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, Plain])
def test_saved_before_a_parameter_has_a_state(tmp_path: Path, writer: str, optimizer: Any) -> None:
    whole = Run(tmp_path / "whole", writer, optimizer)
    losses: list[float] = []
    expected = whole.train(END)
    whole.loop.close()
    # Before any step of the optimizer, before the second head is used, after it.
    for stop in (FIRST_STEP - 1, SECOND_HEAD - 1, SECOND_HEAD + 1, END):
        run = Run(tmp_path / "parts", writer, optimizer)
        assert (run.loop.load() is None) == (not losses)
        losses += run.train(stop)
        run.loop.save()
        run.loop.close()
    assert losses == expected


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_a_load_in_the_middle_of_a_run(tmp_path: Path, writer: str) -> None:
    run = Run(tmp_path, writer, torch.optim.AdamW)
    run.loop.load()
    run.train(SECOND_HEAD - 1)
    run.loop.save()
    expected = run.train(END)
    run.loop.load()
    assert run.train(END) == expected
    run.loop.close()


@pytest.mark.parametrize("writer", ["dcp", "torch"])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda groups, lr: torch.optim.AdamW(groups[1:], lr=lr), r"1\.bias, \w+\.1\.weight: in the checkpoint alone"),
        (lambda groups, lr: torch.optim.AdamW(mixed(groups), lr=lr), "group 0 of 'optimizer' has other parameters"),
        (torch.optim.SGD, r"SGD, with momentum, dampening, nesterov; it was torch\.optim\.adamw\.AdamW"),
    ],
    ids=["fewer parameters", "other groups", "another class"],
)
def test_another_optimizer_than_was_saved(tmp_path: Path, writer: str, other: Any, words: str) -> None:
    run = Run(tmp_path, writer, torch.optim.AdamW)
    run.train(SECOND_HEAD + 1)
    run.loop.save()
    run.loop.close()
    run = Run(tmp_path, writer, other)
    with pytest.raises(StateError, match=rf"not the one that was saved(.|\n)*{words}(.|\n)*before loop\.load"):
        run.loop.load()
    run.loop.close()


def mixed(groups: Any) -> Any:
    """The same parameters, in other groups of as many."""
    (a, b), (c, d) = (list(group["params"]) for group in groups)
    return [{"params": [a, c]}, {"params": [b, d], "lr": 0.05}]


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_parameters_that_were_not_saved(tmp_path: Path, writer: str) -> None:
    run = Run(tmp_path, writer, lambda groups, lr: torch.optim.AdamW(groups[1:], lr=lr))
    run.train(SECOND_HEAD - 1)
    run.loop.save()
    run.loop.close()
    run = Run(tmp_path, writer, torch.optim.AdamW)
    with pytest.raises(StateError, match=r"optimizer\.1\.bias, optimizer\.1\.weight: not in the checkpoint"):
        run.loop.load()
    run.loop.close()


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_a_parameter_that_is_frozen_when_it_is_loaded(tmp_path: Path, writer: str) -> None:
    """It may be trained again by a later step."""
    whole = Run(tmp_path / "whole", writer, torch.optim.AdamW)
    expected = whole.train(END)
    whole.loop.close()
    run = Run(tmp_path / "run", writer, torch.optim.AdamW)
    losses = run.train(SECOND_HEAD + 1)
    run.loop.save()
    run.loop.close()
    run = Run(tmp_path / "run", writer, torch.optim.AdamW)
    run.heads[1].requires_grad_(False)
    run.loop.load()
    run.heads[1].requires_grad_()
    assert losses + run.train(END) == expected
    run.loop.close()


class Odd(torch.optim.Optimizer):
    """What optimizers of other people keep: states of no parameter, of another type than the parameter, in containers
    and objects; options that a step adds; and a count of its own, in a state with one member more."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        self.state["steps"] = torch.tensor(0.0)  # type: ignore[index]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.state["steps"] += 1  # type: ignore[index]
        for group in self.param_groups:
            base = group.setdefault("base", group["lr"] / group["lr"])
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    state["kind"], state["type"] = "first", torch.float64
                    state["sum"] = torch.zeros_like(one, dtype=torch.float64)
                    state["last"] = deque(maxlen=2)
                    state["held"] = Queue()
                elif state["kind"] != "first" or state["sum"].dtype != state["type"] or len(state["last"]) > 2:
                    raise AssertionError(state)
                state["last"].append(one.grad.clone())
                state["held"].last += one.grad.sum().item()
                state["sum"] += one.grad / 3
                change = state["sum"] + sum(state["last"]) + state["held"].last
                one.sub_(change, alpha=group["lr"] * base / (self.count + self.state["steps"].item()))  # type: ignore[index]

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.count = state_dict["count"]


class Queue:
    last = 0.0


class Around(torch.optim.Optimizer):
    """It has another one, and the form of its state is its own."""

    def __init__(self, groups: Any, lr: float) -> None:
        self.inner = torch.optim.AdamW(groups, lr=lr)
        self.slow = [p.detach().clone() for group in self.inner.param_groups for p in group["params"]]
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for slow, one in zip(self.slow, self.parameters(), strict=True):
            one.data.copy_(slow.lerp_(one.data, 0.5))

    def parameters(self) -> list[Any]:
        return [p for group in self.inner.param_groups for p in group["params"]]

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.slow = state_dict["slow"]


@pytest.mark.parametrize("writer", ["dcp", "torch"])
@pytest.mark.parametrize("optimizer", [Odd, Around])
def test_what_optimizers_keep(tmp_path: Path, writer: str, optimizer: Any) -> None:
    whole = Run(tmp_path / "whole", writer, optimizer)
    expected = whole.train(END)
    whole.loop.close()
    losses: list[float] = []
    for stop in (FIRST_STEP + 1, SECOND_HEAD + 2, END):
        run = Run(tmp_path / "parts", writer, optimizer)
        run.loop.load()
        losses += run.train(stop)
        run.loop.save()
        run.loop.close()
    assert losses == expected


class Together(torch.optim.Optimizer):
    """One count, in the states of all parameters."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [one for group in self.param_groups for one in group["params"]]
        if not self.state:
            count = torch.tensor(0.0)
            for one in parameters:
                self.state[one]["count"] = count
        self.state[parameters[0]]["count"] += 1
        for one in parameters:
            if one.grad is not None:
                one.sub_(one.grad, alpha=0.1 / self.state[one]["count"].item())


def with_an_empty_group(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*groups, {"params": [], "lr": 0.3}], lr=lr)


def with_other_names_in_its_state(groups: Any, lr: float) -> torch.optim.Optimizer:
    """By hooks of the user's."""

    def renamed(state: Any, old: str, new: str) -> Any:
        states = {i: {new if key == old else key: v for key, v in one.items()} for i, one in state["state"].items()}
        return {**state, "state": states}

    optimizer = torch.optim.AdamW(groups, lr=lr)
    optimizer.register_state_dict_post_hook(lambda _, state: renamed(state, "exp_avg", "mean"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: renamed(state, "mean", "exp_avg"))
    return optimizer


def with_another_type_in_its_file(groups: Any, lr: float) -> torch.optim.Optimizer:
    """By hooks of the user's."""

    def cast(state: Any, dtype: torch.dtype) -> Any:
        states = {i: {**one, "exp_avg": one["exp_avg"].to(dtype)} for i, one in state["state"].items()}
        return {**state, "state": states}

    optimizer = torch.optim.AdamW(groups, lr=lr)
    optimizer.register_state_dict_post_hook(lambda _, state: cast(state, torch.float64))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: cast(state, torch.float32))
    return optimizer


UNUSUAL = [Together, with_an_empty_group, with_other_names_in_its_state, with_another_type_in_its_file]


@pytest.mark.parametrize("writer", ["dcp", "torch"])
@pytest.mark.parametrize("optimizer", UNUSUAL)
def test_unusual_ones(tmp_path: Path, writer: str, optimizer: Any) -> None:
    whole = Run(tmp_path / "whole", writer, optimizer)
    expected = whole.train(END)
    whole.loop.close()
    run = Run(tmp_path / "parts", writer, optimizer)
    losses = run.train(SECOND_HEAD + 2)
    run.optimizer.param_groups[0]["seen"] = True
    run.optimizer.param_groups[-1]["seen"] = True
    run.loop.save()
    run.loop.close()
    run = Run(tmp_path / "parts", writer, optimizer)
    run.loop.load()
    assert run.optimizer.param_groups[0]["seen"] and run.optimizer.param_groups[-1]["seen"]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "the state lies in the file of the checkpoint"
    assert losses + run.train(END) == expected
    run.loop.close()


def test_an_option_that_differs_by_rank() -> None:
    states = [{"state": {}, "param_groups": [{"params": ["a"], "rank": rank}]} for rank in range(2)]
    states.append({"state": {}, "param_groups": [{"params": ["b"], "rank": 2}]})
    assert joined(states)["param_groups"] == [{"params": ["a"], "rank": 0}, {"params": ["b"], "rank": 2}]


class Sums(torch.optim.Optimizer):
    """It keeps tensors of the shape of a parameter, of its sums, and of neither."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                rows = one.grad.mean(-1, keepdim=True)
                if not state:
                    state |= {"all": torch.zeros_like(one), "rows": torch.zeros_like(rows), "count": torch.zeros(7)}
                state["all"].mul_(0.9).add_(one.grad)
                state["rows"].add_(rows)
                state["count"] += 1
                one.sub_((state["all"] + state["rows"]) / state["count"].mean().item(), alpha=group["lr"])


@pytest.mark.parametrize("writer", ["dcp", "torch"])
@pytest.mark.parametrize("wrapped", [(True, False), (False, True), (True, True)])
def test_sharded_and_not(tmp_path: Path, writer: str, wrapped: tuple[bool, bool]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = Run(tmp_path / "whole", writer, Sums)
        expected = whole.train(END)
        whole.loop.close()
        losses: list[float] = []
        for stop, is_sharded in zip((SECOND_HEAD + 1, END), wrapped, strict=True):
            part = Run(tmp_path / "parts", writer, Sums, is_sharded=is_sharded)
            part.loop.load()
            losses += part.train(stop)
            part.loop.save()
            part.loop.close()
            counts = [state["count"] for state in part.optimizer.state.values()]
            assert all((type(one) is torch.Tensor) == (wrapped != (False, True) or not is_sharded) for one in counts)
        assert losses == expected
    finally:
        dist.destroy_process_group()


def test_one_that_cannot_be_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, "torch", functools.partial(torch.optim.AdamW, weight_decay=0.0))
    run.optimizer.param_groups[0]["scale"] = lambda step: step
    run.train(1)
    with pytest.raises(UsageError, match=r"'optimizer' cannot be saved(.|\n)*lambda(.|\n)*in place of a lambda"):
        run.loop.save()
    run.loop.close()


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_parameters_that_stay_frozen(tmp_path: Path, writer: str) -> None:
    """As of a model of which adapters alone are trained, and whose optimizer was given all of it."""

    def frozen(directory: Path) -> Run:
        run = Run(directory, writer, torch.optim.AdamW)
        run.heads[1].requires_grad_(False)
        return run

    whole, run = frozen(tmp_path / "whole"), frozen(tmp_path / "run")
    expected, losses = whole.train(END), run.train(SECOND_HEAD + 1)
    run.loop.save()
    whole.loop.close()
    run.loop.close()
    run = frozen(tmp_path / "run")
    run.loop.load()
    assert losses + run.train(END) == expected
    assert all(parameter not in run.optimizer.state for parameter in run.heads[1].parameters())
    run.loop.close()


class Twofold(torch.optim.Adam):
    """Its step calls its parent's, which has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Closures(torch.optim.LBFGS):
    """It steps several times in one step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    "made",
    [
        lambda *models: [Twofold(model.parameters()) for model in models],
        lambda *models: [Closures(model.parameters()) for model in models],
        lambda *models: [torch.optim.SGD([p]) for model in models for p in model.parameters()],
    ],
    ids=["a subclass", "closures", "one for each parameter"],
)
def test_steps_that_are_one_for_each_batch(tmp_path: Path, made: Any) -> None:
    """Several optimizers, a scaler that skips a step, and steps within an accumulation."""
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # the hooks of the parent's step come with an instance
    models = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 1), "other": torch.nn.Linear(2, 1)})
    optimizers = made(*models.values())
    loader = megaresume.DataLoader(Numbers(), batch_size=4, accumulation=2)
    objects = {"models": models} | {f"optimizer {n}": one for n, one in enumerate(optimizers)}
    loop = megaresume.attach(objects, loader, checkpoints=Checkpoints(save_dir=tmp_path))
    for batch in loop:

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            loss = sum(model(batch.float() / 100).pow(2).mean() for model in models.values())
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            return loss

        for one in optimizers:
            one.zero_grad()
            if loop.step != 1:
                one.step(closure)
        if loop.ends_step:
            loop.stepped()
        if loop.step == 3:
            break
    loop.save()
    assert loop.samples == 24
    loop.close()


def train_by_closure(loop: Any, model: torch.nn.Module, optimizer: Any, steps: int) -> list[float]:
    """Load, train to this step, save: the losses."""
    loop.load()
    losses = []
    for batch in loop:

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(batch.float() / 100) - 1).pow(2).mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
        loop.stepped()
        if loop.step == steps:
            break
    try:
        loop.save()
    finally:
        loop.close()
    return losses


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_one_that_needs_a_closure(tmp_path: Path, writer: Any) -> None:
    def train(directory: Path, *, steps: int) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        loader = megaresume.DataLoader(Numbers(), batch_size=4)
        objects = {"model": model, "optimizer": optimizer}
        loop = megaresume.attach(objects, loader, checkpoints=directory, writer=writer)
        return train_by_closure(loop, model, optimizer, steps)

    whole = train(tmp_path / "whole", steps=END)
    assert train(tmp_path / "parts", steps=3) + train(tmp_path / "parts", steps=END) == whole


def test_one_that_gives_its_state_after_a_collective(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    loader = megaresume.DataLoader(Numbers(), batch_size=4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(UsageError, match=r"cannot be saved(.|\n)*ZeroRedundancyOptimizer(.|\n)*fully_shard"):
            megaresume.attach({"model": model, "optimizer": optimizer}, loader, checkpoints=tmp_path)
    finally:
        dist.destroy_process_group()


class Sharpness(torch.optim.Optimizer):
    """SAM as it is often written: it asserts that it is given a closure, and its state lacks the inner optimizer's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.base_optimizer = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.state[one]["up"] = 0.05 * one.grad
                    one.add_(self.state[one]["up"])
        with torch.enable_grad():
            loss = closure()
        for one, state in self.state.items():
            one.sub_(state["up"])
        for group in self.param_groups:
            group["lr"] *= 0.9
        self.base_optimizer.step()
        return loss


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_one_that_steps_by_another(tmp_path: Path, writer: Any) -> None:
    """Refused while the momentum of the inner one is in no checkpoint; then it continues as if nobody had stopped."""

    def train(directory: Path, *, steps: int, inner: bool = True) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = Sharpness(model.parameters())
        objects = {"model": model, "optimizer": optimizer} | ({"inner": optimizer.base_optimizer} if inner else {})
        loop = megaresume.attach(
            objects, megaresume.DataLoader(Numbers(), batch_size=4), checkpoints=directory, writer=writer
        )
        return train_by_closure(loop, model, optimizer, steps)

    with pytest.raises(UsageError, match=r"inside another one(.|\n)*Sharpness, whose(.|\n)*SGD(.|\n)*base_optimizer"):
        train(tmp_path / "refused", steps=1, inner=False)
    whole = train(tmp_path / "whole", steps=END)
    assert train(tmp_path / "parts", steps=3) + train(tmp_path / "parts", steps=END) == whole


@pytest.mark.parametrize("writer", ["dcp", "torch"])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_a_model_of_another_dtype(
    tmp_path: Path, writer: str, saved: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rounded weights are named; a type that cannot hold the values is refused."""

    def loop_of(dtype: torch.dtype) -> Any:
        model = torch.nn.Linear(2, 1)
        model.register_buffer("scale", torch.full((1,), 1 / 3).to(dtype))
        loader = megaresume.DataLoader(Numbers(), batch_size=4)
        return megaresume.attach({"model": model}, loader, checkpoints=tmp_path, writer=writer)

    for dtype in (saved, saved, torch.float16):
        loop = loop_of(dtype)
        loop.load()
        named = f"model.scale is {dtype}, and was {saved}. What is read is rounded"
        assert (named in capfd.readouterr().out) == (dtype != saved)
        next(iter(loop))
        loop.stepped()
        if dtype == saved:
            loop.save()
        loop.close()
    loop = loop_of(torch.int64)
    with pytest.raises(StateError, match=rf"other dtypes(.|\n)*model.scale is torch.int64, and was {saved}"):
        loop.load()
    loop.close()


class TwoWeights:
    """As schedulefree's wrapper: its state is another one's, and an attribute says which weights the model has."""

    def __init__(self, parameters: Any) -> None:
        self.base, self.train_mode = torch.optim.Adam(parameters, lr=0.01), False
        self.state_dict, self.load_state_dict = self.base.state_dict, self.base.load_state_dict

    @torch.no_grad()
    def train(self) -> None:
        for one in [] if self.train_mode else self.base.state:
            one.mul_(1.5)
        self.train_mode = True


@pytest.mark.parametrize("writer", ["dcp", "torch"])
@pytest.mark.parametrize("first", ["train", "load"])
def test_one_whose_mode_is_not_in_its_state(tmp_path: Path, writer: Any, first: str) -> None:
    def train(directory: Path, *stops: int) -> list[float]:
        losses = []
        for stop in stops:
            torch.manual_seed(0)
            model = torch.nn.Linear(2, 1)
            optimizer = TwoWeights(model.parameters())
            loader = megaresume.DataLoader(Numbers(), batch_size=4)
            objects = {"model": model, "optimizer": optimizer}
            loop = megaresume.attach(objects, loader, checkpoints=directory, writer=writer)
            for call in (optimizer.train, loop.load) if first == "train" else (loop.load, optimizer.train):
                call()
            for batch in loop:
                loss = model(batch.float() / 100).pow(2).mean()
                optimizer.base.zero_grad()
                loss.backward()
                optimizer.base.step()
                loop.stepped()
                losses.append(loss.item())
                if loop.step == stop:
                    break
            loop.save()
            loop.close()
        return losses

    assert train(tmp_path / "whole", END) == train(tmp_path / "parts", 3, END)
