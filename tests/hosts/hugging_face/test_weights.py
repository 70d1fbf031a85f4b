"""Weights that have other names in a checkpoint of the Trainer's than in its model, as Mixtral's experts do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import megaresume
from megaresume.stream.errors import CheckpointError
from tests.hosts.hugging_face.program import BASE, Recorder, make
from tests.hosts.torch.record import losses

pytestmark = pytest.mark.process

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def mixtral() -> Any:
    torch.manual_seed(1)
    return MixtralForCausalLM(MixtralConfig(vocab_size=BASE, num_key_value_heads=1, num_local_experts=4, **SIZES))


def run(output: Path, model: Any = None, **options: Any) -> Recorder:
    trainer = make(output, learning_rate=1e-2, max_steps=12, **options)
    if model is not None:
        trainer.model = trainer.model_wrapped = model
    megaresume.attach(trainer)
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.mark.parametrize("shards", [False, True])
def test_the_losses_are_those_of_a_run_that_nobody_stopped(
    tmp_path: Path, shards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shards:
        save = MixtralForCausalLM.save_pretrained
        monkeypatch.setattr(
            MixtralForCausalLM, "save_pretrained", lambda *args, **more: save(*args, **more | {"max_shard_size": 3000})
        )
    run(tmp_path / "whole", mixtral())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", mixtral(), kill=("interrupt", 7))
    saved = tmp_path / "cut" / "checkpoint-5"
    assert len(list(saved.glob("model*.safetensors"))) > 1 if shards else (saved / "model.safetensors").exists()
    run(tmp_path / "cut", mixtral(), attempt=2)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_the_best_model_is_whole(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True, "save_steps": 5}
    options |= {"metric_for_best_model": "earliness", "greater_is_better": True}
    model = mixtral()
    trainer = make(tmp_path / "run", learning_rate=1e-2, max_steps=12, **options)
    trainer.eval_dataset = trainer.train_dataset
    trainer.compute_metrics = lambda _: {"earliness": -trainer.state.global_step}
    trainer.model = trainer.model_wrapped = model
    megaresume.attach(trainer)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best is not None and best.endswith("-5")
    whole = MixtralForCausalLM.from_pretrained(best).state_dict()
    assert all(torch.equal(weight, whole[name]) for name, weight in model.state_dict().items())


class Forgetful(GPT2LMHeadModel):
    """Saves all but one of its weights."""

    def save_pretrained(self, *args: Any, state_dict: Any = None, **more: Any) -> None:
        state = {name: weight for name, weight in self.state_dict().items() if "mlp.c_fc.weight" not in name}
        super().save_pretrained(*args, state_dict=state, **more)


def forgetful(output: Path, *, frozen: bool = False, **options: Any) -> Recorder:
    torch.manual_seed(1)
    model = Forgetful(make(output).model.config)
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(not frozen)
    return run(output, model, **options)


def test_a_checkpoint_that_lacks_a_trained_weight_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        forgetful(tmp_path / "run", kill=("interrupt", 7))
    assert not any("c_fc.weight" in name for name in load_file(tmp_path / "run" / "checkpoint-5" / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"lacks weights that are trained(.|\n)*h\.0\.mlp\.c_fc\.weight"):
        forgetful(tmp_path / "run", attempt=2)


def test_a_frozen_weight_may_be_missing(tmp_path: Path) -> None:
    forgetful(tmp_path / "whole", frozen=True)
    with pytest.raises(KeyboardInterrupt):
        forgetful(tmp_path / "cut", frozen=True, kill=("interrupt", 7))
    forgetful(tmp_path / "cut", frozen=True, attempt=2)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


class Wrapping(torch.nn.Module):
    """A model around another one, as GLiNER's and FlagEmbedding's; the heads are its own."""

    def __init__(self, *heads: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = {"vocab_size": BASE, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        self.inner = GPT2LMHeadModel(GPT2Config(**sizes))
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1) for name in heads})

    def forward(self, **inputs: Any) -> Any:
        out = self.inner(**inputs)
        for head in self.heads.values():
            out.loss = out.loss + head(torch.ones(1)).square().sum()
        return out


def wrapped(output: Path, monkeypatch: pytest.MonkeyPatch, *heads: str, **options: Any) -> Any:
    monkeypatch.setattr(
        Recorder, "_save", lambda self, path=None, state_dict=None: self.model.inner.save_pretrained(path)
    )
    model = Wrapping(*heads)
    run(output, model, remove_unused_columns=False, **options)
    return model


def test_a_model_that_saves_the_one_within_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = wrapped(tmp_path / "whole", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        wrapped(tmp_path / "cut", monkeypatch, kill=("interrupt", 7))
    cut = wrapped(tmp_path / "cut", monkeypatch, attempt=2)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert all(torch.equal(weight, whole.state_dict()[name]) for name, weight in cut.state_dict().items())


def test_a_model_that_loses_what_is_around_the_one_within_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        wrapped(tmp_path / "run", monkeypatch, "sparse", kill=("interrupt", 7))
    with pytest.raises(CheckpointError, match=r"lacks weights that are trained(.|\n)*heads\.sparse\.weight and 1 more"):
        wrapped(tmp_path / "run", monkeypatch, "sparse", attempt=2)
