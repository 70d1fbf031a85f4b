"""`TrainerHost`: Hugging Face's Trainer as the host of a `Session`.

The data state lies in ``trainer_state.json`` of a checkpoint, beside the number of steps that the weights have made.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import Envelope
from megaresume.checkpoint.session.host import Reading, Save
from megaresume.checkpoint.topology import Topology
from megaresume.hosts.hugging_face.backends import Written, check_loadable, expected_files, failing_late, zero_stage
from megaresume.hosts.torch.feeds import Items, micro_batches, micro_batches_to, say_left_over
from megaresume.hosts.torch.host import StepHost, write_all
from megaresume.hosts.torch.steps import Steps, words_of
from megaresume.stream.errors import StateError, UsageError

#: the key in ``stateful_callbacks`` of trainer_state.json.
KEY = "megaresume"
STATE = "trainer_state.json"

#: see `check_loadable`.
WRITTEN: Written = {
    "DeepSpeed": (("global_step*",), "TrainingArguments(deepspeed=...)"),
    "FSDP": (("pytorch_model_fsdp*", "optimizer.bin", "optimizer_[0-9]*"), "TrainingArguments(fsdp=...)"),
    "DDP": (("optimizer.pt",), "neither deepspeed nor fsdp"),
}

WORDS = words_of(
    trainer="the Trainer",
    name="trainer.get_train_dataloader()",
    clock="the optimizer step",
    untrained=(
        "a callback or a method took a batch of train_dataloader; or the first of the Trainer's callbacks was removed",
        "to look at a batch: trainer.data_collator([dataset[0], dataset[1]])",
    ),
    other_count=(
        "the Trainer's state was changed by hand, or loaded from another checkpoint",
        "trainer.train(resume_from_checkpoint=True), and nothing else, loads checkpoints",
    ),
)


class TrainerHost(StepHost):
    """See `megaresume.checkpoint.session.host.Host`.

    Args:
        trainer: transformers' Trainer.
        loader: the batches of this rank.
    """

    forgotten = "trainer.train() was called without resume_from_checkpoint, or output_dir was used before"
    load = "trainer.train(resume_from_checkpoint=True)"
    begin_anew = "load its weights with from_pretrained, and train with another output_dir"

    def __init__(self, trainer: Any, loader: DataLoader) -> None:
        self.trainer, self.loader = trainer, loader
        self.steps = Steps(Items(loader), WORDS)
        self.framework = f"transformers {importlib.metadata.version('transformers')}"
        #: the samples that the epoch begins and ends with, of the one that was trained last; (0, 0): not known yet.
        self._epoch = 0, 0

    def topology(self) -> Topology:
        """See `Host`."""
        return replace(super().topology(), zero_stage=zero_stage(self.trainer.accelerator))

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """See `Host`."""
        return expected_files(
            self.trainer.accelerator, save_dir, tag, inner=lambda engine: f"global_step{engine.global_steps}"
        )

    def stepped(self) -> None:
        """An optimizer step was made. Raises StateError: see `Count`."""
        self.steps.stepped()
        self.steps.compare(int(self.trainer.state.global_step))
        self.trainer.state.epoch = self.loader.epoch + self._part_of_epoch()

    def _part_of_epoch(self) -> float:
        """What of the epoch is trained. The Trainer's own counts batches, which differ from one epoch to the next."""
        begin, end = self._epoch
        if not begin <= self.steps.samples < end:
            before, end = end, self.loader.epoch_end
            begin = before or max(end - self.loader.items, 0)
            self._epoch = begin, end
        return max(self.steps.samples - begin, 0) / (end - begin) if end > begin else 0.0

    def check_epoch(self, epoch: int) -> None:
        """Raise a UsageError unless the loader has come to an epoch, which the Trainer begins."""
        loader = self.loader
        if loader.epoch != epoch:
            raise UsageError(
                "control.should_epoch_stop cannot be used with megaresume.attach",
                found=f"the Trainer begins epoch {epoch}, and the data stands at sample {loader.samples}, in epoch "
                f"{loader.epoch}, which has samples up to {loader.epoch_end}",
                expected="epochs that come to their end: their other items would never be trained",
                cause="a callback set control.should_epoch_stop",
                action="control.should_training_stop ends the run, and a resume goes on there; to evaluate or save "
                "within an epoch, eval_steps and save_steps; to train fewer items, torch.utils.data.Subset of the "
                "dataset",
            )

    def write(self, save: Save, write: Any) -> None:
        """Write a checkpoint by the Trainer's own method ``write()``, with the data state in its trainer_state.json."""
        self.trainer.state.stateful_callbacks[KEY] = save.envelope.to_dict()

        def write_files() -> None:
            with failing_late(self.trainer.accelerator, (self.trainer, "_save")) as errors:
                write()
                if errors:
                    raise errors[0]

        write_all(save, write_files)

    def read(self, choice: Choice, before: Topology | None) -> Reading:
        """What lies with the weights, which the Trainer reads later. On every rank; raises on its own.

        Args:
            choice: the checkpoint.
            before: how the run was laid out when it saved; None: not known.

        Raises:
            StateError: trainer_state.json cannot be read, or what it holds of ours is damaged.
            CheckpointError: see `check_loadable`.
        """
        path = choice.tag_dir / STATE
        try:
            state = json.loads(path.read_text())
            step, within = int(state["global_step"]), (state.get("stateful_callbacks") or {}).get(KEY)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"{STATE} of the checkpoint cannot be read",
                found=f"{path}: {type(error).__name__}: {error}",
                expected="what the Trainer writes last",
                cause="the save was killed, and the checkpoint was written without megaresume",
                action="delete this checkpoint: megaresume latest shows the newest that is complete",
            ) from error
        envelope = None if within is None else Envelope.read(within)
        if envelope is not None:
            check_loadable(
                self.trainer.accelerator, choice.tag_dir, before, written=WRITTEN, begin_anew=self.begin_anew
            )
        return Reading(envelope=envelope, iteration=step, samples=0 if envelope is None else envelope.samples)

    # How long a run and an epoch are

    def end(self) -> tuple[int, int]:
        """(epochs, optimizer steps) with which the run ends; sets the last sample of the loader.

        Raises:
            UsageError: the data ends before ``max_steps``.
        """
        args, loader = self.trainer.args, self.loader
        if args.max_steps > 0:
            return loader.epoch + self._epochs_of(max(args.max_steps - self.steps.step, 0)), int(args.max_steps)
        loader.stop = max(self._end_of(args.num_train_epochs), self.steps.samples)
        say_left_over(loader, loader.stop - self.steps.samples)
        steps = self._steps(micro_batches(loader, loader.stop - self.steps.samples))
        return math.ceil(args.num_train_epochs), self.steps.step + steps

    def _epochs_of(self, steps: int) -> int:
        """Epochs that so many more steps are of, this one included."""
        epochs, end = 0, self.steps.samples
        for epochs, end in enumerate(self.loader.epoch_ends() if steps else (), 1):
            if end - self.steps.samples >= steps * self.loader.step_samples:
                return epochs
        if (there := self._steps(micro_batches(self.loader, end - self.steps.samples))) < steps:
            raise UsageError(
                "the data ends before the last step",
                found=f"data for {self.steps.step + there} steps",
                expected=f"{self.steps.step + steps}: max_steps",
                cause="max_epochs of a dataset",
                action="fewer max_steps, or more max_epochs",
            )
        return epochs

    def _end_of(self, epochs: float) -> int:
        """The sample with which so many epochs since the start of the run end, or the data."""
        loader, ends = self.loader, self.loader.epoch_ends()
        end = next(ends)
        more = epochs - loader.epoch - 1  # after this one
        for _ in range(math.floor(more)):
            end = next(ends, end)
        part = more - max(math.floor(more), 0)
        there = end + math.ceil(part * loader.items)
        return there if part <= 0 else min(there, next(ends, end))

    def batches_of_epoch(self) -> tuple[int, int]:
        """(micro-batches, optimizer steps) from here to the end of the epoch."""
        batches = micro_batches_to(self.loader, self.loader.epoch_end, self.steps.samples)
        return batches, self._steps(batches)

    def _steps(self, batches: int) -> int:
        return -(-batches // self.loader.accumulation)


class Batches:
    """What the Trainer trains from, in the place of the loader that they are of."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps.feed.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["steps"].feed.loader, name)
