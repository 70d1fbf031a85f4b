"""Hugging Face's Trainer, resumed by ``train(resume_from_checkpoint=True)``, which passes over trained batches."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.launch import Plan
from benchmarks.peers.recorder import Recorder
from benchmarks.peers.scenario import SAVE_EVERY, SEED
from benchmarks.peers.tools.base import Numbers, Tool


def train(plan: Plan, rank: int) -> None:
    """The whole run: Trainer has a loop and checkpoints of its own."""
    import torch
    import transformers
    from transformers.trainer_utils import get_last_checkpoint

    from benchmarks.peers.worker import end

    recorder = Recorder(plan.directory / "records", plan.life, rank)

    class Model(torch.nn.Module):
        """Of one weight."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, number: Any) -> Any:
            """The loss."""
            return {"loss": (self.weight * number).mean()}

    class Recorded(transformers.Trainer):
        """Writes down what it is given to train."""

        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            self.given = [int(number) for number in inputs["number"]]
            return super().training_step(model, inputs, *rest, **more)

    class Steps(transformers.TrainerCallback):
        """Writes a step down when its weights are changed."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            recorder.began(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            recorder.trained(state.global_step, trainer.given)
            if state.global_step == plan.kill_after:
                end(rank)

    output = plan.directory / "checkpoints"
    trainer = Recorded(
        model=Model(),
        args=transformers.TrainingArguments(
            output_dir=str(output),
            per_device_train_batch_size=plan.layout.batch_size,
            dataloader_num_workers=plan.layout.workers,
            num_train_epochs=plan.epochs,
            save_strategy="steps",
            save_steps=SAVE_EVERY,
            seed=SEED,
            use_cpu=True,
            ddp_backend="gloo",
            remove_unused_columns=False,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Numbers(plan.layout.items),
        data_collator=lambda items: {"number": torch.tensor(items, dtype=torch.float32)},
        callbacks=[Steps()],
    )
    saved = output.exists() and get_last_checkpoint(str(output)) is not None
    trainer.train(resume_from_checkpoint=saved or None)


TOOL = Tool(
    title="Hugging Face `Trainer`",
    packages=("transformers", "accelerate", "torch"),
    documentation=("https://huggingface.co/docs/transformers/main/en/trainer#checkpoints",),
    own_loop=train,
)
