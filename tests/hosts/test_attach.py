"""`megaresume.attach`: what it is given decides who takes it; everything else is refused in the words of the call."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_overloads

import pytest
import torch

import megaresume
from megaresume.hosts.attach import OWN_LOOP, TRAINERS, KnownTrainer
from megaresume.hosts.trainer import merge_trainer_settings
from megaresume.stream.errors import SetupError, UsageError
from tests.docs.pages import DOCS


def kind(package: str, name: str, **methods: Any) -> type:
    """A class as that package would define it."""
    return type(name, (), {"__module__": f"{package}.some.module", **methods})


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
    """What each trainer's own function was called with."""
    calls: list[tuple[str, Any, dict[str, Any]]] = []
    for trainer in (*TRAINERS, OWN_LOOP):
        module = importlib.import_module(trainer.module)
        signature = inspect.signature(module.attach)

        def attach(one: Any, _module: str = trainer.module, **options: Any) -> Any:
            calls.append((_module.split(".")[2], one, options))
            return "what it returns"

        attach.__signature__ = signature  # type: ignore[attr-defined]
        monkeypatch.setattr(module, "attach", attach)
    yield calls


def test_a_type_checker_knows_the_options_of_a_loop() -> None:
    of_loop = inspect.signature(importlib.import_module(OWN_LOOP.module).attach).parameters
    typed = inspect.signature(get_overloads(megaresume.attach)[0]).parameters
    assert set(typed) - {"trainer"} == set(of_loop) - {"objects"}
    assert all(typed[name].default == of_loop[name].default for name in ("data", "writer", "stop", "context_parallel"))


@pytest.mark.parametrize("trainer", [*TRAINERS, OWN_LOOP], ids=lambda trainer: trainer.module)
def test_whoever_saves_by_megaresume_takes_metrics(trainer: KnownTrainer) -> None:
    parameters = inspect.signature(importlib.import_module(trainer.module).attach).parameters
    assert ("metrics" in parameters) == ("checkpoints" in parameters)


def test_the_signature_in_the_document() -> None:
    parameters = inspect.signature(megaresume.attach).parameters.values()
    words = [str(one.replace(annotation=one.empty)) for one in parameters]
    words.insert(next(i for i, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY), "*")
    assert f"megaresume.attach({', '.join(words)})\n" in (DOCS / "attach.md").read_text()


def test_whom_it_goes_to(taken: list[Any]) -> None:
    """A class that is made from theirs, in a script of the user's own, is of them."""
    for package, name, room in (
        ("deepspeed", "DeepSpeedEngine", "deepspeed"),
        ("transformers", "Trainer", "hugging_face"),
        ("trl", "AsyncGRPOTrainer", "trl"),
        ("accelerate", "Accelerator", "accelerate"),
        ("lightning", "Trainer", "lightning"),
        ("pytorch_lightning", "Trainer", "lightning"),
        ("torchtitan", "Trainer", "torchtitan"),
        ("verl", "SFTTrainer", "verl"),
        ("verl", "RayPPOTrainer", "verl_prompts"),
        ("verl", "SeparateRayPPOTrainer", "verl_separate"),
        ("megatron", "ConfigContainer", "megatron_bridge"),
    ):
        made = type("Mine", (kind(package, name),), {"__module__": "__main__"})()
        checkpoints = megaresume.Checkpoints(save_dir="run")
        options = (
            {}
            if name in ("RayPPOTrainer", "SeparateRayPPOTrainer", "AsyncGRPOTrainer")
            else {"checkpoints": checkpoints}
        )
        options |= {"data": 1} if package in ("accelerate", "megatron") else {}
        assert megaresume.attach(made, **options) == "what it returns"
        assert taken[-1] == (room, made, options)
    megaresume.attach({"model": 1}, 2, checkpoints=megaresume.Checkpoints(save_dir="run"), writer="torch")
    assert taken[-1][0] == "loop" and taken[-1][2]["writer"] == "torch"


def test_the_order_of_the_table_means_nothing(taken: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that inherits from another one of the table goes to its own row; a mapping to the loop's."""
    checkpoints = megaresume.Checkpoints(save_dir="run")
    trl = kind("trl", "AsyncGRPOTrainer")
    trl = type("AsyncGRPOTrainer", (trl, kind("transformers", "Trainer")), {"__module__": "__main__"})
    for table in (TRAINERS, TRAINERS[::-1]):
        monkeypatch.setattr("megaresume.hosts.attach.TRAINERS", table)
        megaresume.attach(trl())
        assert taken[-1][0] == "trl"
        megaresume.attach({"model": 1}, 2, checkpoints=checkpoints)
        assert taken[-1][0] == "loop"


def test_every_row_has_a_class() -> None:
    """Without one nothing would be recognised as that trainer."""
    assert [trainer.name for trainer in TRAINERS if not trainer.classes] == []


def test_real_classes() -> None:
    """They are still called what the table says, and lie where it says."""
    import accelerate
    import deepspeed
    import lightning
    import pytorch_lightning
    import transformers
    from deepspeed.runtime.pipe.engine import PipelineEngine

    for cls in (
        deepspeed.DeepSpeedEngine,
        PipelineEngine,
        transformers.Trainer,
        transformers.Seq2SeqTrainer,
        accelerate.Accelerator,
        lightning.Trainer,
        pytorch_lightning.Trainer,
    ):
        with pytest.raises(UsageError, match="a class is attached, and its instance is wanted"):
            megaresume.attach(cls)


def test_every_instance_of_a_class(taken: list[Any]) -> None:
    """torchtitan's and VeRL's own programs make their trainers: the class is attached."""

    def make(self: Any, config: Any) -> None:
        self.config = config

    titan = kind("torchtitan", "Trainer", __init__=make)
    assert megaresume.attach(titan, stop=megaresume.StopConditions()) is titan
    one, other = titan(5), type("Mine", (titan,), {})(6)
    assert [(room, thing.config) for room, thing, _ in taken] == [("torchtitan", 5), ("torchtitan", 6)]
    assert taken[0][1] is one and taken[1][1] is other and taken[0][2] == {"stop": megaresume.StopConditions()}
    with pytest.raises(UsageError, match="this class is attached already"):
        megaresume.attach(type("Mine", (titan,), {}))
    old = kind("verl", "RayPPOTrainer", _create_dataloader=lambda self, *data: setattr(self, "data", data))
    megaresume.attach(old, append="now")
    driver = old()
    assert len(taken) == 2
    driver._create_dataloader(1, 2)
    assert taken[2][1:] == (driver, {"append": "now"}) and driver.data == (1, 2)
    # After the first of two that an instance calls; after each call of that one, so that a second one is refused.
    methods = dict.fromkeys(("_create_dataloader", "_init_worker_groups"), lambda self: None)
    separate = kind("verl", "SeparateRayPPOTrainer", **methods)
    megaresume.attach(separate)
    both, one = separate(), separate()
    both._create_dataloader()
    both._init_worker_groups()
    one._init_worker_groups()
    assert [thing for _, thing, _ in taken[3:]] == [both, one]
    both._create_dataloader()
    assert taken[5][1] is both
    with pytest.raises(UsageError, match=r"makes no trainer(.|\n)*without _build_ckpt_handler"):
        megaresume.attach(kind("verl", "SFTTrainer"))


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (torch.nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear(.|\n)*\{'model': model, 'optimizer': optimizer\}"),
        (torch.utils.data.DataLoader([1]), r"megaresume\.DataLoader\(dataset, batch_size\) replaces torch's"),
        (megaresume.DataLoader([1, 2]), "the loader is the second argument"),
        ("data.yaml", "a DeepSpeed engine; TRL's AsyncGRPOTrainer; Hugging Face's Trainer"),
        (None, r"found: +builtins\.NoneType(.|\n)*docs/hosts\.md"),
        (torch.optim.SGD, "the class SGD"),
        (SimpleNamespace(), "a ConfigContainer of Megatron-Bridge"),
    ],
)
def test_what_it_does_not_know(thing: Any, words: str) -> None:
    with pytest.raises(UsageError, match=r"does not recognise this trainer(.|\n)*" + words):
        megaresume.attach(thing)


def test_a_directory_stands_for_checkpoints(taken: list[Any], tmp_path: Path) -> None:
    for directory in (str(tmp_path), tmp_path):
        megaresume.attach({"model": torch.nn.Linear(1, 1)}, [1], checkpoints=directory)
    assert [options["checkpoints"] for _, _, options in taken] == [
        megaresume.Checkpoints(save_dir=directory) for directory in (str(tmp_path), tmp_path)
    ]


def test_options_of_another_trainer() -> None:
    lightning, accelerator = kind("lightning", "Trainer")(), kind("accelerate", "Accelerator")()
    checkpoints = megaresume.Checkpoints(save_dir="run")
    with pytest.raises(UsageError, match=r"attach\(trainer\) has no data(.|\n)*expected: +checkpoints, stop"):
        megaresume.attach(lightning, [1, 2], checkpoints=checkpoints)
    with pytest.raises(UsageError, match=r"has no check_points(.|\n)*did you mean 'checkpoints'"):
        megaresume.attach(lightning, check_points=checkpoints)
    with pytest.raises(UsageError, match=r"attach\(trainer\) needs checkpoints(.|\n)*pass checkpoints=\"run\""):
        megaresume.attach(lightning)
    with pytest.raises(UsageError, match=r"attach\(accelerator, loader\) needs data(.|\n)*the loader as the second"):
        megaresume.attach(accelerator)
    with pytest.raises(UsageError, match=r"has no stop(.|\n)*append, checkpoints"):
        megaresume.attach(kind("verl", "SFTTrainer"), stop=megaresume.StopConditions())


@pytest.mark.parametrize(
    ("options", "action"),
    [
        ({"seqlength": 3}, "leave seqlength out; docs/attach.md says which trainer has which options"),
        ({"check_points": "x"}, "write checkpoints"),
        ({"save_dir": "q"}, "pass checkpoints=megaresume.Checkpoints(save_dir='q')"),
        ({"keep_lst": 3}, "pass checkpoints=megaresume.Checkpoints(keep_last=3)"),
        ({"loader_options": megaresume.LoaderOptions(num_workers=2)}, "pass num_workers=2 where the loader is made"),
        (
            {"data_options": megaresume.DataOptions(on_change="stage")},
            "pass on_change='stage' where the loader is made",
        ),
        ({"checkpoints": {"save_dir": "q"}}, "write checkpoints=megaresume.Checkpoints(save_dir='q')"),
        ({"checkpoints": 5}, "write checkpoints=megaresume.Checkpoints(save_dir='run')"),
        ({"stop": "auto"}, "write stop=megaresume.StopConditions(before_end='auto')"),
        ({"loader": [1]}, "a loader is the second argument, without a name"),
        ({"elastic": True}, "leave it out"),
        (
            {"loader_options": [1]},
            "write loader_options=megaresume.LoaderOptions(num_workers=2); a loader is the "
            "second argument, without a name",
        ),
    ],
)
def test_what_to_write_instead(options: dict[str, Any], action: str) -> None:
    with pytest.raises(UsageError) as caught:
        megaresume.attach({"model": 1}, [1], **{"checkpoints": "run", **options})
    assert caught.value.action == action


@pytest.mark.parametrize(
    ("options", "action"),
    [
        ({"seqlength": 3}, "write seq_length"),
        ({"checkpoint_dir": "x"}, "write checkpoints"),
        ({"save_dir": "q"}, "set output_dir of TrainingArguments"),
        ({"elastic": True}, "leave it out"),
        ({"batch_size": 4}, "set per_device_train_batch_size of TrainingArguments"),
        ({"keep_every": 4}, "pass checkpoints=megaresume.Checkpoints(keep_every=4)"),
        ({"data_options": megaresume.DataOptions(on_change="stage")}, "pass on_change='stage' itself"),
    ],
)
def test_what_to_write_instead_under_the_trainer(options: Any, action: str) -> None:
    """Its other options are those of a loader, which it looks at by itself."""
    from megaresume.hosts.hugging_face_data import _check_options

    with pytest.raises(UsageError) as caught:
        _check_options(options)
    assert caught.value.action == action
    assert str(caught.value.expected).startswith("data, checkpoints, stop, metrics, append, on_change")


@pytest.mark.parametrize("name", ["PPOTrainer", "RayPPOTrainer", "SeparateRayPPOTrainer"])
def test_trainers_of_prompts_save_by_themselves(name: str) -> None:
    """So nothing of theirs could be copied to a store, and whoever asks for it is told what to do."""
    checkpoints = megaresume.Checkpoints(save_dir="run", stage_to="s3://bucket/run")
    told = r"has no checkpoints(.|\n)*s3://bucket/run(.|\n)*copy a complete checkpoint, and then prompts\.jsonl"
    with pytest.raises(UsageError, match=told):
        megaresume.attach(kind("verl", name), checkpoints=checkpoints)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"save_dir": "here"},
            r"cause: +Hugging Face's Trainer saves to its own output_dir, '/there'(.|\n)*set output_dir",
        ),
        ({"keep_last": 3}, r"cause: +Hugging Face's Trainer keeps as many as its own save_total_limit says"),
    ],
)
def test_what_a_trainer_decides_by_itself(given: dict[str, Any], words: str) -> None:
    own = {"save_dir": ("output_dir", "/there"), "keep_last": ("save_total_limit", None)}
    (name,) = given
    with pytest.raises(UsageError, match=rf"{name} cannot be used(.)* under Hugging Face's Trainer(.|\n)*{words}"):
        merge_trainer_settings(megaresume.Checkpoints(**given), trainer="Hugging Face's Trainer", **own)
    assert merge_trainer_settings(megaresume.Checkpoints(), **own) == megaresume.Checkpoints(save_dir="/there")


def test_a_trainer_of_verl_that_is_made() -> None:
    made = kind("verl", "SFTTrainer")()
    vars(made).update(ckpt_handler=None, training_client=None, train_dataset=None, fit=None, resume_global_step=8)
    with pytest.raises(UsageError, match=r"has loaded its checkpoint already(.|\n)*attach\(SFTTrainer\), before"):
        megaresume.attach(made)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (OWN_LOOP.module, "megaresume.hosts.files"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"megaresume\.attach needs the package 'torch'(.|\n)*megaresume\[torch\]"):
        megaresume.attach({"model": None}, None)


def test_the_page_has_a_section_for_each() -> None:
    page = (Path(megaresume.__file__).parents[1] / "docs" / "attach.md").read_text()
    for trainer in (*TRAINERS, OWN_LOOP):
        assert f"megaresume.{trainer.call}" in page, trainer.name
