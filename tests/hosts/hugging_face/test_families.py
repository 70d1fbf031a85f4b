"""Trainers of other people that are taken, by class and method; tried with the real packages, which are not here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from transformers import TrainerCallback

import megaresume
from megaresume.hosts.hugging_face_data import collator
from megaresume.hosts.hugging_face_families import undo_settings
from megaresume.stream.errors import UsageError
from tests.hosts.hugging_face.program import Numbers, Recorder, make

pytestmark = pytest.mark.process


def trainer_of(output: Path, module: str, name: str, method: str, **members: Any) -> Any:
    """A Trainer of a class of this name, with a method of its own."""
    own = type(name, (Recorder,), {"__module__": module, method: lambda self, *args, **more: None})
    trainer = make(output)
    trainer.__class__ = type("Mine", (own,), {})
    for member, value in members.items():
        setattr(trainer, member, value)
    return trainer


LLAMA_FACTORY = ("llamafactory.train.sft.trainer", "CustomSeq2SeqTrainer", "_get_train_sampler")
DPO = ("trl.trainer.dpo_trainer", "DPOTrainer", "get_train_dataloader")
KTO = ("trl.trainer.kto_trainer", "KTOTrainer", "_get_train_sampler")
SWIFT = ("swift.trainers.mixin", "DataLoaderMixin", "get_train_dataloader")
SWIFT_SAVE = ("swift.trainers.mixin", "SwiftMixin", "_save_checkpoint")
AXOLOTL = ("axolotl.core.trainers.base", "AxolotlTrainer", "_get_train_sampler")
SENTENCE_TRANSFORMERS = ("sentence_transformers.base.trainer", "BaseTrainer", "get_train_dataloader")
SENTENCE_TRANSFORMERS_5 = ("sentence_transformers.trainer", "SentenceTransformerTrainer", "get_train_dataloader")
GLINER = ("gliner.training.trainer", "Trainer", "get_train_dataloader")
SENTENCE_TRANSFORMERS_SAVE = ("sentence_transformers.base.trainer", "BaseTrainer", "_save")


@pytest.mark.parametrize("disabled", [False, True])
def test_llama_factory(tmp_path: Path, disabled: bool) -> None:
    settings = SimpleNamespace(disable_shuffling=disabled)
    trainer = trainer_of(tmp_path / "run", *LLAMA_FACTORY, finetuning_args=settings)
    if disabled:
        with pytest.raises(UsageError, match="disable_shuffling cannot be used"):
            megaresume.attach(trainer)
    else:
        assert len(megaresume.attach(trainer)) == 50


@pytest.mark.parametrize("setting", [None, "group_by_length", "train_dataloader_shuffle", "sequence_parallel_size"])
def test_swift(tmp_path: Path, setting: str | None) -> None:
    template = SimpleNamespace(sequence_parallel_size=2 if setting == "sequence_parallel_size" else 1)
    trainer = trainer_of(tmp_path / "run", *SWIFT, template=template)
    trainer.args.group_by_length = setting == "group_by_length"
    trainer.args.train_dataloader_shuffle = setting != "train_dataloader_shuffle"
    if setting:
        with pytest.raises(UsageError, match=f"{setting}.* cannot be used"):
            megaresume.attach(trainer)
    else:
        assert len(megaresume.attach(trainer)) == 50


class LazyLLMDataset(Numbers):
    """As ms-swift's, which takes so many other items until one can be encoded; or of which all were encoded before."""

    def __init__(self, n_try_fetch: int, *columns: str) -> None:
        super().__init__()
        self.n_try_fetch, self.dataset = n_try_fetch, SimpleNamespace(column_names=["messages", *columns])


def test_swift_saves(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", *SWIFT_SAVE)
    trainer.args.use_flash_ckpt, trainer.args.resume_only_model = False, True
    with pytest.raises(UsageError, match="resume_only_model cannot be used"):
        megaresume.attach(trainer)
    trainer.args.resume_only_model = False
    trainer.train_dataset = torch.utils.data.Subset(LazyLLMDataset(10), range(8))
    with pytest.raises(UsageError, match="lazy_tokenize without strict cannot be used"):
        megaresume.attach(trainer)
    for name, dataset in {"strict": LazyLLMDataset(1), "encoded": LazyLLMDataset(10, "lengths")}.items():
        trainer = trainer_of(tmp_path / name, *SWIFT_SAVE)
        trainer.args.use_flash_ckpt = False
        trainer.train_dataset = torch.utils.data.Subset(dataset, range(8))
        assert len(megaresume.attach(trainer)) == 4


@pytest.mark.parametrize("setting", [None, "sample_packing", "curriculum_sampling"])
def test_axolotl(tmp_path: Path, setting: str | None) -> None:
    # It makes them of the epochs, by the batch size of today.
    trainer = trainer_of(tmp_path / "run", *AXOLOTL, axolotl_cfg=SimpleNamespace(max_steps=None))
    trainer.args.max_steps = 25
    trainer.args.sample_packing = setting == "sample_packing"
    trainer.args.curriculum_sampling = setting == "curriculum_sampling"
    if setting:
        with pytest.raises(UsageError, match=f"{setting} cannot be used"):
            megaresume.attach(trainer)
    else:
        assert len(megaresume.attach(trainer)) == 50
        assert trainer.args.max_steps == -1


@pytest.mark.parametrize("computed", [False, True])
def test_dpo(tmp_path: Path, computed: bool) -> None:
    trainer = trainer_of(tmp_path / "run", *DPO, precompute_ref_log_probs=computed)
    if computed:
        with pytest.raises(UsageError, match="precompute_ref_log_probs cannot be used"):
            megaresume.attach(trainer)
    else:
        assert len(megaresume.attach(trainer)) == 50


@pytest.mark.parametrize("estimates", [False, True])
def test_kto(tmp_path: Path, estimates: bool) -> None:
    trainer = trainer_of(tmp_path / "run", *KTO, calculate_KL=estimates)
    trainer.args.loss_type = "kto"
    if estimates:
        trainer.args.train_sampling_strategy = "sequential"  # its default, which TRL requires for this loss
        with pytest.raises(UsageError, match=r"estimates the KL term cannot be used(.|\n)*apo_zero_unpaired"):
            megaresume.attach(trainer)
    else:
        assert len(megaresume.attach(trainer)) == 50


def test_a_trainer_of_trl_that_generates(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", "trl.trainer.grpo_trainer", "GRPOTrainer", "get_train_dataloader")
    with pytest.raises(UsageError, match=r"its own loader(.|\n)*next action: +AsyncGRPOTrainer"):
        megaresume.attach(trainer)


@pytest.mark.parametrize("name", ["SyncRefModelCallback", "BEMACallback"])
@pytest.mark.parametrize("late", [False, True])
def test_a_callback_of_trl_that_loses_its_state(tmp_path: Path, name: str, late: bool) -> None:
    theirs = pytest.importorskip("trl.trainer.callbacks", reason="TRL is not installed")
    own = type("Mine", (getattr(theirs, name),), {"__init__": lambda self: None})
    trainer = make(tmp_path / "run")
    if late:
        megaresume.attach(trainer)
    trainer.add_callback(own())
    with pytest.raises(UsageError, match=f"{name.replace('SyncRefModelCallback', 'sync_ref_model')} cannot be used"):
        trainer.train() if late else megaresume.attach(trainer)


@pytest.mark.parametrize("use_asa", [None, False, True])
def test_a_model_of_peft_that_moves_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_asa: bool | None
) -> None:
    """As AdaLoRA does, whose configuration has no ``use_asa``, and AdaMSS; by scores that no checkpoint holds."""
    trainer = make(tmp_path / "run", max_steps=2)
    config = SimpleNamespace() if use_asa is None else SimpleNamespace(use_asa=use_asa)
    calls: list[int] = []
    tuner = SimpleNamespace(peft_config={"default": config}, update_and_allocate=calls.append)
    monkeypatch.setattr(type(trainer.model), "base_model", tuner)
    megaresume.attach(trainer)

    class Allocating(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            tuner.update_and_allocate(state.global_step)

    trainer.add_callback(Allocating())
    if use_asa is False:
        trainer.train()
        assert calls == [0, 1]
    else:
        with pytest.raises(UsageError, match="update_and_allocate cannot be used"):
            trainer.train()
        assert not calls and not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize("trainers", [SENTENCE_TRANSFORMERS, SENTENCE_TRANSFORMERS_5], ids=["6", "5"])
@pytest.mark.parametrize("sampler", ["batch_sampler", "no_duplicates"])
def test_sentence_transformers(tmp_path: Path, sampler: str, trainers: tuple[str, str, str]) -> None:
    trainer = trainer_of(tmp_path / "run", *trainers)
    trainer.args.batch_sampler = sampler
    if sampler != "batch_sampler":
        with pytest.raises(UsageError, match="batch_sampler cannot be used"):
            megaresume.attach(trainer)
    else:
        trainer.args.remove_unused_columns = True
        assert len(megaresume.attach(trainer)) == 50
        assert collator(trainer) is trainer.data_collator  # it takes all columns, whatever the model's forward does


def test_gliner(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", *GLINER)
    assert trainer.args.remove_unused_columns
    assert len(megaresume.attach(trainer)) == 50
    assert collator(trainer) is trainer.data_collator  # its own loader leaves every column, too


def test_sentence_transformers_on_several_ranks(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", *SENTENCE_TRANSFORMERS)
    trainer.args = SimpleNamespace(world_size=2, dataloader_drop_last=True)  # as its arguments say of themselves
    undo_settings(trainer)
    assert not trainer.args.dataloader_drop_last


def test_sentence_transformers_of_several_datasets(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", *SENTENCE_TRANSFORMERS)
    trainer.args.batch_sampler = "batch_sampler"
    trainer.train_dataset = {"web": Numbers(), "code": Numbers()}
    with pytest.raises(UsageError, match=r"several datasets(.|\n)*web, code(.|\n)*concatenate_datasets"):
        megaresume.attach(trainer)


@pytest.mark.parametrize("own", [False, True])
def test_sentence_transformers_saves(tmp_path: Path, own: bool) -> None:
    trainer = trainer_of(tmp_path / "run", *SENTENCE_TRANSFORMERS_SAVE)
    trainer.loss = torch.nn.ModuleDict(
        {"model": trainer.model} | ({"classifier": torch.nn.Linear(2, 2)} if own else {})
    )
    if own:
        with pytest.raises(UsageError, match=r"ModuleDict\.classifier\.weight"):
            megaresume.attach(trainer)
    else:
        assert len(megaresume.attach(trainer)) == 50


def test_the_same_method_of_another_class(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", "llamafactory.train.kto.trainer", "CustomKTOTrainer", "_get_train_sampler")
    with pytest.raises(UsageError, match="its own sampler"):
        megaresume.attach(trainer)
