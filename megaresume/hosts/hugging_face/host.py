"""`TrainerHost`: Hugging Face's Trainer as the host of a `Session`.

The data state lies in ``trainer_state.json`` of a checkpoint, beside the number of steps that the weights have made.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Sequence
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
        self.framework = f"transformers {importlib.metadata.version('transformers')}"
        #: optimizer steps made, and samples that they trained: what is read ahead is not.
        self.step, self.trained = 0, 0
        #: the samples that the epoch begins and ends with, of the one that was trained last; (0, 0): not known yet.
        self._epoch = 0, 0

    def iteration(self) -> int:
        """See `Host`."""
        return self.step

    def samples(self) -> int:
        """See `Host`."""
        return self.trained

    def topology(self) -> Topology:
        """See `Host`."""
        return replace(Items(self.loader).topology(self.trained), zero_stage=zero_stage(self.trainer.accelerator))

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """See `Host`."""
        return expected_files(
            self.trainer.accelerator, save_dir, tag, inner=lambda engine: f"global_step{engine.global_steps}"
        )

    def stepped(self) -> None:
        """An optimizer step was made, of the batches handed out last. Raises as `check_step`."""
        self.check_step(self.step + 1)
        self.step, self.trained = self.step + 1, self.loader.samples
        self.trainer.state.epoch = self.loader.epoch + self._part_of_epoch()

    def _part_of_epoch(self) -> float:
        """What of the epoch is trained. The Trainer's own counts batches, which differ from one epoch to the next."""
        begin, end = self._epoch
        if not begin <= self.trained < end:
            before, end = end, self.loader.epoch_end
            begin = before or max(end - self.loader.items, 0)
            self._epoch = begin, end
        return max(self.trained - begin, 0) / (end - begin) if end > begin else 0.0

    def check_step(self, expected: int) -> None:
        """Raise a StateError unless the Trainer counts so many steps."""
        if (counted := int(self.trainer.state.global_step)) != expected:
            raise StateError(
                "the Trainer and the data count different steps",
                found=f"global_step {counted}",
                expected=f"{expected}",
                cause="the Trainer's state was changed by hand, or loaded from another checkpoint; or the first of its "
                "callbacks was removed",
                action="trainer.train(resume_from_checkpoint=True), and nothing else, loads checkpoints",
            )

    def check_position(self) -> None:
        """Raise a StateError unless the loader stands after the last step."""
        if self.loader.samples != self.trained:
            raise StateError(
                "the loader was read by somebody else",
                found=f"the loader at sample {self.loader.samples}; the steps of the run at sample {self.trained}",
                expected="the same",
                cause="a batch was taken from trainer.get_train_dataloader(), or from what megaresume.attach returned; "
                "it would never be trained",
                action="to look at a batch: trainer.data_collator([dataset[0], dataset[1]])",
            )

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
            return loader.epoch + self._epochs_of(max(args.max_steps - self.step, 0)), int(args.max_steps)
        loader.stop = max(self._end_of(args.num_train_epochs), self.trained)
        say_left_over(loader, loader.stop - self.trained)
        steps = self._steps(micro_batches(loader, loader.stop - self.trained))
        return math.ceil(args.num_train_epochs), self.step + steps

    def _epochs_of(self, steps: int) -> int:
        """Epochs that so many more steps are of, this one included."""
        epochs, end = 0, self.trained
        for epochs, end in enumerate(self.loader.epoch_ends() if steps else (), 1):
            if end - self.trained >= steps * self.loader.step_samples:
                return epochs
        if (there := self._steps(micro_batches(self.loader, end - self.trained))) < steps:
            raise UsageError(
                "the data ends before the last step",
                found=f"data for {self.step + there} steps",
                expected=f"{self.step + steps}: max_steps",
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
        batches = micro_batches_to(self.loader, self.loader.epoch_end, self.trained)
        return batches, self._steps(batches)

    def _steps(self, batches: int) -> int:
        return -(-batches // self.loader.accumulation)
