"""TRL's SFTTrainer under `megaresume.attach`: packed rows of its own, each once an epoch, whatever the layout."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import megaresume
from megaresume.stream.errors import StateError, UsageError
from tests.release import release

pytestmark = [pytest.mark.process]
trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets")

TEXTS, LENGTH = 90, 24


class Cut(BaseException):
    pass


def train(
    output: Path, *, cut: int | None = None, texts: int = TEXTS, attach: Any = None, **options: Any
) -> tuple[list[Any], Any]:
    """(rows of every step from the newest checkpoint on, by their tokens; the Trainer)."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    class Recorder(trl.SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            if self.state.global_step == cut:
                raise Cut
            steps.append([tuple(row) for row in rows_of(inputs)])
            return super().training_step(model, inputs, *args, **more)

    steps: list[Any] = []
    vocabulary = {"<pad>": 0, "<eos>": 1} | {str(k): k for k in range(2, 200)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=200, num_attention_heads=2, **shape))
    defaults: dict[str, Any] = {
        "max_length": LENGTH,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    settings = trl.SFTConfig(output_dir=str(output), **defaults | options)
    data = datasets.Dataset.from_list([{"input_ids": [2 + k] * (1 + 7 * k % 20) + [1]} for k in range(texts)])
    trainer = Recorder(model, settings, train_dataset=data, processing_class=tokenizer)
    megaresume.attach(trainer, **attach or {})
    try:
        trainer.train(resume_from_checkpoint=True)
    except Cut:
        steps.append(None)
    return steps, trainer


def rows_of(inputs: Any) -> list[list[int]]:
    """What the model is given, text by text; padding is left out."""
    tokens = inputs["input_ids"]
    if "position_ids" not in inputs:
        return [[token for token in row if token] for row in tokens.tolist()]
    starts = [*torch.nonzero(inputs["position_ids"][0] == 0)[:, 0].tolist(), tokens.shape[1]]
    return [tokens[0, a:b].tolist() for a, b in pairwise(starts)]


def flat(steps: list[Any]) -> list[Any]:
    return [row for step in steps if step for row in step]


RELEASE = release(
    "`[not-packed]`, `[wrapped]`: three trainings each",
    "the same, `[bfd]`",
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="not-packed", marks=RELEASE),
        pytest.param({"packing": True}, id="bfd"),
        pytest.param({"packing": True, "packing_strategy": "wrapped"}, id="wrapped", marks=RELEASE),
    ],
)
def test_its_own_content_exactly_with_half_the_batch(tmp_path: Path, options: Any) -> None:
    whole, trainer = train(tmp_path / "whole", **options)
    its_own = trainer.train_dataset
    texts: list[Any] = []
    for row in its_own:
        lengths = row.get("seq_lengths") or [len(row["input_ids"])]
        starts = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
        texts += [tuple(row["input_ids"][a:b]) for a, b in pairwise(starts)]
    assert len(its_own) < TEXTS or not options
    assert sorted(flat(whole)) == sorted(texts * 2)

    first, _ = train(tmp_path / "cut", cut=5, **options)
    assert first[-1] is None
    rest, _ = train(tmp_path / "cut", per_device_train_batch_size=2, **options)
    assert flat(first[:4]) + flat(rest) == flat(whole)  # the fifth step was not saved


def test_packed_otherwise_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", cut=3, packing=True)
    with pytest.raises(StateError, match="dataset 'data'"):
        train(tmp_path / "run", packing=True, max_length=2 * LENGTH)


def test_packed_by_megaresume(tmp_path: Path) -> None:
    attach = {"seq_length": LENGTH}
    with pytest.raises(UsageError, match=r"SFTConfig\(padding_free=True, max_length=None\)"):
        train(tmp_path / "padded", attach=attach)
    whole, _ = train(tmp_path / "whole", attach=attach, padding_free=True, max_length=None)
    assert len(flat(whole)) == 2 * TEXTS and len(set(flat(whole))) == TEXTS
