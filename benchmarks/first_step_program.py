"""A training program as a user writes it, to the end of its first step: with megaresume, or without anything of it.

python benchmarks/first_step_program.py TRAINER ours|alone fresh|saving|resumed DIRECTORY [LENGTHS]

TRAINER is torch (under DDP if a launcher started it), transformers, deepspeed, or stream: a loop of torch's over packed
samples of the documents of LENGTHS. Megatron's program is a script of its own.
It continues from the checkpoint in DIRECTORY, if there is one; "saving" saves one there after its first step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

BATCH = 8


class Rows(torch.utils.data.Dataset[Any]):
    """Item i is a vector and its sum."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> Any:
        inputs = torch.full((8,), i / len(self))
        return {"inputs": inputs, "labels": inputs.sum().reshape(1)}


class Net(torch.nn.Module):
    """A small model that gives its loss, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.net(inputs), labels)}


def torch_loop(is_ours: bool, saves: bool, directory: Path, *_: str) -> None:
    """A loop of one's own, under DDP if it was launched; alone it saves with torch.save."""
    model: torch.nn.Module = Net()
    if is_launched := "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches: Any
    if is_ours:
        import megaresume

        loader = megaresume.DataLoader(Rows(), batch_size=BATCH, max_epochs=1)
        parts = {"model": model, "optimizer": optimizer}
        batches = loop = megaresume.attach(parts, loader, checkpoints=megaresume.Checkpoints(save_dir=directory))
        loop.load()
    else:
        sampler: Any = torch.utils.data.DistributedSampler(Rows()) if is_launched else None
        batches = torch.utils.data.DataLoader(Rows(), batch_size=BATCH, shuffle=sampler is None, sampler=sampler)
        for path in directory.glob("*.pt"):
            parts = torch.load(path)
            model.load_state_dict(parts["model"])
            optimizer.load_state_dict(parts["optimizer"])
    batch = next(iter(batches))
    model(**batch)["loss"].backward()
    optimizer.step()
    if is_ours:
        loop.stepped()
        if saves:
            loop.save()
            loop.close()
    elif saves and os.environ.get("RANK", "0") == "0":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, directory / "1.pt")


def stream_loop(is_ours: bool, saves: bool, directory: Path, lengths: str) -> None:
    """A loop over packed samples; alone, over tokens that are there."""
    model = torch.nn.Embedding(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_ours:
        import megaresume

        new_stream = megaresume.Stream  # before the two modules that are the benchmark's
        from benchmarks.corpora import config
        from benchmarks.lengths import open_lengths

        stream = new_stream(config("best_fit"), open_lengths(Path(lengths)))
        loader = megaresume.StreamLoader(stream, megaresume.BatchSchedule.constant(BATCH), micro_batch_size=BATCH)
        parts = {"model": model, "optimizer": optimizer}
        loop = megaresume.attach(parts, loader, checkpoints=megaresume.Checkpoints(save_dir=directory))
        loop.load()
        tokens = next(iter(loop))["tokens"]
    else:
        tokens = torch.ones(BATCH, 4096, dtype=torch.int64)
    model(tokens % 8).sum().backward()
    optimizer.step()
    if is_ours:
        loop.stepped()
        if saves:
            loop.save()
            loop.close()


def trainer(is_ours: bool, saves: bool, directory: Path, *_: str) -> None:
    """Hugging Face's Trainer."""
    import transformers

    is_new = not any(directory.glob("checkpoint-*"))
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=1 if is_new else 2,
        per_device_train_batch_size=BATCH,
        save_strategy="steps" if saves else "no",
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    made = transformers.Trainer(Net(), arguments, train_dataset=Rows())
    if is_ours:
        import megaresume

        megaresume.attach(made)
    made.train(resume_from_checkpoint=not is_new)


def deepspeed_loop(is_ours: bool, saves: bool, directory: Path, *_: str) -> None:
    """DeepSpeed's engine; alone with the loader that `deepspeed.initialize` makes."""
    import deepspeed

    model = Net()
    config = {"train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    data = None if is_ours else Rows()
    engine, _, batches, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=data
    )
    if is_ours:
        import megaresume

        loader = megaresume.DataLoader(Rows(), batch_size=BATCH)
        batches = megaresume.attach(engine, loader, checkpoints=megaresume.Checkpoints(save_dir=directory))
    engine.load_checkpoint(str(directory))
    batch = next(iter(batches))
    engine.backward(engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()})["loss"])
    engine.step()
    if saves:
        engine.save_checkpoint(str(directory))
        if is_ours:
            batches.close()


#: by the package that each needs, or "stream".
PROGRAMS: dict[str, Callable[..., None]] = {
    "torch": torch_loop,
    "transformers": trainer,
    "deepspeed": deepspeed_loop,
    "stream": stream_loop,
}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    name, side, state, where, *more = sys.argv[1:]
    PROGRAMS[name](side == "ours", state == "saving", Path(where), *more)
    sys.stdout.flush()
    os._exit(0)  # what ending costs belongs to no first step
