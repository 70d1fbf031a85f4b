"""Frozen weights that no checkpoint holds, as below an adapter of PEFT's; trained ones that PEFT does not save.

The models here have PEFT's structure, which the code goes by: a tuner with the model inside, and layers with adapters.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import megaresume
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.hosts.frozen import (
    FrozenWeights,
    below_adapters,
    check_frozen,
    entries,
    summarize,
    unsaved,
    weights_of,
)
from megaresume.hosts.hugging_face_weights import check_adapter
from megaresume.stream.errors import CheckpointError, StateError
from tests.hosts.hugging_face.program import BASE, Recorder, make
from tests.hosts.torch.record import losses

pytestmark = pytest.mark.process


class Adapter(nn.Module):
    """A layer, and what is trained beside it."""

    adapter_layer_names = ("added",)

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.added = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) * (1 + self.added)  # type: ignore[no-any-return]


class Replaced(nn.Module):
    """A layer in place of which a copy is trained: ``modules_to_save``."""

    def __init__(self, original: nn.Module, copy: nn.Module) -> None:
        super().__init__()
        self.original_module, self.modules_to_save = original, copy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.modules_to_save(x)  # type: ignore[no-any-return]


class Tuner(nn.Module):
    """Holds the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def inject_adapter(self) -> None:
        """By which a tuner is known."""


class Adapted(nn.Module):
    """A model of which a checkpoint holds the trained parameters alone."""

    peft_config: Any = None
    _keys_to_ignore_on_save: Any = None

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.base_model = Tuner(inner)

    def forward(self, input_ids: Any, labels: Any, **_: Any) -> dict[str, torch.Tensor]:
        logits = self.base_model.model(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def state_dict(self, *args: Any, **more: Any) -> dict[str, Any]:
        return {name: one.detach() for name, one in self.named_parameters() if one.requires_grad}


def adapted(*, base: int = 1, dtype: torch.dtype = torch.float32, original: int = 1, scale: float = 1.0) -> Adapted:
    """A model; ``base`` and ``original`` are the seeds of its frozen weights, and of those that it does not use."""
    torch.manual_seed(base)
    embedding, layer = nn.Embedding(BASE, 8), nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight *= scale
    torch.manual_seed(original)
    unused = nn.Linear(8, BASE)
    torch.manual_seed(7)
    model = Adapted(nn.Sequential(embedding, Adapter(layer), Replaced(unused, nn.Linear(8, BASE))))
    for name, one in model.named_parameters():
        one.requires_grad_("added" in name or "modules_to_save" in name)
    return model.to(dtype)


def run(output: Path, model: nn.Module, *, compare: bool = True, teacher: Any = None, **options: Any) -> Recorder:
    trainer = make(output, learning_rate=1e-2, max_steps=12, **options)
    trainer.model = trainer.model_wrapped = model
    if teacher is not None:
        trainer.teacher_model = teacher  # type: ignore[attr-defined]
    megaresume.attach(trainer, checkpoints=megaresume.Checkpoints(compare_frozen=compare))
    trainer.train(resume_from_checkpoint=True)
    return trainer


def cut(output: Path, model: nn.Module, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(output, model, kill=("interrupt", 7), **options)


def test_the_same_frozen_weights_resume(tmp_path: Path) -> None:
    """Those that are not used, as copies are trained in place of them, may be others."""
    run(tmp_path / "whole", adapted())
    cut(tmp_path / "cut", adapted())
    run(tmp_path / "cut", adapted(original=2), attempt=2)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    state = json.loads((tmp_path / "cut" / "checkpoint-12" / "trainer_state.json").read_text())
    recorded = state["stateful_callbacks"]["megaresume"]["frozen"]["sums"]
    assert {kind: of[0] for kind, of in recorded.items()} == {
        f"float32[{BASE}, 8]": 1,
        "float32[8, 8]": 1,
        "float32[8]": 1,
    }


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"base": 2}, r"1 float32\[8, 8\] \(their values differ by"),
        ({"dtype": torch.float64}, r"found: +1 float64\[32, 8\](.|\n)*expected: +1 float32\[32, 8\]"),
        ({"scale": 1.001}, r"found: +1 float32\[8, 8\] \(their values differ by 0\.1 %\)"),
    ],
    ids=["another base", "another dtype", "a thousandth"],
)
def test_other_frozen_weights_are_refused(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    cut(tmp_path / "run", adapted())
    with pytest.raises(
        StateError, match=rf"weights that no checkpoint holds are not those(.|\n)*{said}(.|\n)*compare_frozen=False"
    ):
        run(tmp_path / "run", adapted(**other), attempt=2)
    assert all(step <= 7 for step in losses(tmp_path / "run"))
    run(tmp_path / "run", adapted(**other), attempt=3, compare=False)


def test_rounding_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cut(tmp_path / "run", adapted())
    run(tmp_path / "run", adapted(scale=1.0001), attempt=2)
    assert "WARNING: weights that no checkpoint holds differ by 1e-02 %" in capfd.readouterr().out


def doubled(layer: nn.Module) -> None:
    for one in layer.parameters():
        one.data *= 2


def test_another_teacher_is_refused(tmp_path: Path) -> None:
    cut(tmp_path / "run", adapted(), teacher=nn.Linear(3, 3))
    with pytest.raises(StateError, match=r"weights that no checkpoint holds are not those(.|\n)*float32\[3, 3\]"):
        run(tmp_path / "run", adapted(), teacher=nn.Linear(3, 3).requires_grad_(False).apply(doubled), attempt=2)


def test_a_trained_weight_that_peft_does_not_save_is_refused(tmp_path: Path) -> None:
    model = adapted()
    made = nn.ModuleDict({"default": nn.ModuleDict({"embedding": nn.Embedding(2, 8), "mlp": nn.Linear(8, 8)})})
    optimizer = SimpleNamespace(param_groups=[{"params": [*model.parameters(), *made.parameters()]}])
    trainer = SimpleNamespace(model=model, optimizer=optimizer)
    check_adapter(trainer, tmp_path)  # DeepSpeed's files
    save_file({"base_model.model.2.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    check_adapter(trainer, tmp_path)
    model.prompt_encoder = made
    with pytest.raises(CheckpointError, match=r"prompt_encoder\.default\.mlp\.weight and 1 more(.|\n)*PromptTuning"):
        check_adapter(trainer, tmp_path)
    del model.prompt_encoder
    model.base_model.model[1].base_layer.bias.requires_grad_(True)
    with pytest.raises(
        CheckpointError, match=r"without base_model\.model\.1\.base_layer\.bias\n(.|\n)*modules_to_save"
    ):
        check_adapter(trainer, tmp_path)
    save_file({"base_model.model.1.base_layer.bias": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    check_adapter(trainer, tmp_path)


def test_a_whole_save_without_a_trained_weight_is_refused(tmp_path: Path) -> None:
    """The Trainer writes what PEFT would; no checkpoint counts."""
    model = adapted()
    model.base_model.model[1].base_layer.bias.requires_grad_(True)

    def save(output_dir: str, state_dict: Any = None) -> None:
        names = [name for name in model.state_dict() if "base_layer" not in name]
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_file({name: model.state_dict()[name] for name in names}, Path(output_dir, "adapter_model.safetensors"))

    trainer = make(tmp_path / "run", max_steps=12)
    trainer.model = trainer.model_wrapped = model
    trainer._save = save  # type: ignore[method-assign]
    megaresume.attach(trainer)
    with pytest.raises(CheckpointError, match=r"lacks weights that are trained(.|\n)*base_layer\.bias"):
        trainer.train()
    assert not list((tmp_path / "run" / "megaresume").glob("*.manifest*"))


def test_other_models_have_no_adapters() -> None:
    assert not list(below_adapters(nn.Linear(2, 2)))


TENSORS = [torch.linspace(0, number, 8 * 1001).sin().reshape(1001, 8) for number in (3, 5)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.int32])
def test_every_value_and_place_counts(dtype: torch.dtype) -> None:
    tensors = [(100 * one).to(dtype) for one in TENSORS]
    whole = summarize(tensors)
    check_frozen(whole, json.loads(json.dumps(summarize([one.clone() for one in tensors]))), action="")
    row = [one.clone() for one in tensors]
    row[1][7] = row[1][3]
    for others in ([tensors[1], tensors[0]], [tensors[0].flip(0), tensors[1]], row, tensors[:1], []):
        with pytest.raises(StateError):
            check_frozen(whole, summarize(others), action="")


@pytest.mark.parametrize("values", [float("nan"), float("inf")])
def test_values_that_are_no_numbers(values: float) -> None:
    whole = summarize([torch.full((4,), values)])
    check_frozen(whole, whole, action="")
    with pytest.raises(StateError):
        check_frozen(whole, summarize([torch.ones(4)]), action="")


def test_what_cannot_be_read_is_counted() -> None:
    whole = summarize(TENSORS)
    check_frozen(whole, summarize([one.to("meta") for one in TENSORS]), action="")
    with pytest.raises(StateError):
        check_frozen(whole, summarize([TENSORS[0].to("meta")]), action="")


def test_weights_that_change_are_summed_up_again() -> None:
    weights = dict(zip("ab", [one.clone() for one in TENSORS], strict=True))
    frozen = FrozenWeights(lambda: weights)
    first = frozen.record(lambda _: [])
    weights["b"] *= 2
    second = frozen.record(lambda _: [])
    assert first is not None and second is not None
    frozen.check(second)
    with pytest.raises(StateError):
        frozen.check(first)
    assert frozen.record(lambda names: names) is None


def test_weights_that_change_between_saves_are_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    """Unless they may be somewhere else, or nobody compares them."""
    weights = {"a": TENSORS[0].clone()}
    frozen = FrozenWeights(lambda: weights)
    no_state: Any = None
    save: Any = SimpleNamespace(envelope=Envelope(state=no_state, iteration=0), compare_frozen=True)
    for _ in range(2):
        frozen.note(save, lambda _: [])
    weights["a"] *= 2
    frozen.note(save, lambda _: [], may_be_elsewhere=lambda: True)
    weights["a"] *= 2
    save.compare_frozen = False
    frozen.note(save, lambda _: [])
    assert "WARNING" not in capfd.readouterr().out
    save.compare_frozen = True
    weights["a"] *= 2
    frozen.note(save, lambda _: [])
    assert "have changed since the last save or load: 1 float32[1001, 8]. " in capfd.readouterr().out


def test_a_tied_weight_is_there_by_any_of_its_names() -> None:
    one, two = (nn.Parameter(torch.ones(1), requires_grad=False) for _ in range(2))
    weights = {"a": one, "b": one, "c": two, "d": two}
    assert unsaved(weights, ["b"]) == ["d"]


def stepped(net: nn.Module, kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = kind(net.parameters(), 0.1)  # type: ignore[call-arg]
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_a_trained_weight_that_a_state_leaves_out_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """A state with other names may hold it, or something else may: then it is a warning, and compared at a load."""
    net = nn.Linear(2, 2)
    weights = weights_of({"0": net})
    adam, sgd = stepped(net, torch.optim.Adam), stepped(net, torch.optim.SGD)
    with pytest.raises(CheckpointError, match=r"a state without weight\n(.|\n)*compare_frozen=False"):
        unsaved(weights, ["0.bias"], [adam])
    assert unsaved(weights, ["0.bias"], [sgd]) == ["0.weight"]  # which shows nothing
    net.weight.grad = torch.ones(2, 2)
    with pytest.raises(CheckpointError):
        unsaved(weights, ["0.bias"], [sgd])
    assert "WARNING" not in capfd.readouterr().out
    assert unsaved(weights, ["0.bias", "0.other"], [adam]) == ["0.weight"]
    assert "WARNING: the state of the model lacks weights that are trained: weight." in capfd.readouterr().out
    assert unsaved(weights, [], [adam], may_be_elsewhere=lambda: True) == ["0.weight", "0.bias"]
    assert "lacks weights that are trained: weight, bias." in capfd.readouterr().out
    net.weight.requires_grad_(False)
    net.weight.grad = None
    with pytest.raises(CheckpointError, match=r"a state without weight\n"):  # it was trained before
        unsaved(weights, ["0.bias"], [adam])
    assert unsaved(weights, ["0.bias"], [torch.optim.Adam(net.parameters())]) == ["0.weight"]
    assert "WARNING" not in capfd.readouterr().out


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_an_untrained_weight_of_an_optimizer_may_be_left_out(kind: Any) -> None:
    """One that no step has changed, such as those of a part that is used without gradients."""
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    optimizer = kind(net.parameters())
    net["used"](torch.ones(2)).sum().backward()
    optimizer.step()
    names = ["0.used.weight", "0.used.bias"]
    assert unsaved(weights_of({"0": net}), names, [optimizer]) == ["0.other.weight", "0.other.bias"]


def test_names_without_wrappers_and_buffers_that_are_saved() -> None:
    net = nn.BatchNorm1d(2)
    net.register_buffer("passing", torch.zeros(1), persistent=False)
    state = torch.compile(nn.Sequential(net)).state_dict()  # type: ignore[attr-defined]
    found = weights_of({"0": nn.Sequential(net)})
    assert list(found) == entries({"0": state})
    assert "0.0.running_mean" in found and "0.0.passing" not in found


WAYS = ("whole", "sharded", "replicated", "zero")


def divided(how: str, rank: int, ranks: int) -> Iterable[torch.Tensor]:
    """This rank's part of the tensors, as it is divided by DDP, FSDP2, with replicas too, or ZeRO-3."""
    if how == "whole":
        return TENSORS
    if how == "zero":
        parts = []
        for one in TENSORS:
            empty: Any = torch.empty(0)
            size = -(-one.numel() // ranks)
            empty.ds_tensor = (
                nn.functional.pad(one.flatten(), (0, size * ranks - one.numel())).chunk(ranks)[rank].clone()
            )
            empty.ds_tensor.ds_numel, empty.ds_numel, empty.ds_shape = size, one.numel(), one.shape
            empty.ds_process_group = dist.group.WORLD
            parts.append(empty)
        return parts
    mesh = init_device_mesh("cpu", (1, ranks) if how == "sharded" else (ranks, 1))
    return [distribute_tensor(one, mesh, [Replicate(), Shard(0)]) for one in TENSORS]


def of_ranks(rank: int, ranks: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=ranks)
    found = {how: summarize(divided(how, rank, ranks)) for how in WAYS}
    (directory / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each of three ranks, by how the tensors were divided."""
    ranks, directory = 3, tmp_path_factory.mktemp("sums")
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=of_ranks, args=(rank, ranks, directory)) for rank in range(ranks)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("how", WAYS)
def test_sums_do_not_depend_on_how_tensors_are_divided(how: str, sums: list[dict[str, Any]]) -> None:
    whole = summarize(TENSORS)["float32[1001, 8]"]
    for found in sums:
        assert found[how]["float32[1001, 8]"][1:] == pytest.approx(whole[1:], rel=1e-6)
