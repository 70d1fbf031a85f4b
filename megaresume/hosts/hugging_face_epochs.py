"""`Epochs`: the length of a run of Hugging Face's Trainer, and of its epochs, in samples from where it continues."""

from __future__ import annotations

import math
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.hosts.feeds import micro_batches, micro_batches_to, warn_of_left_over
from megaresume.hosts.steps import Steps
from megaresume.stream.errors import UsageError


class Epochs:
    """The length of a run and its epochs.

    Args:
        loader: the loader that the Trainer reads from.
        steps: counts the steps.
    """

    def __init__(self, loader: DataLoader, steps: Steps) -> None:
        self._loader, self._steps = loader, steps
        #: first sample and end of the epoch that was last trained; (0, 0): unknown so far.
        self._epoch = 0, 0

    def of_run(self, args: Any) -> tuple[int, int]:
        """(epochs, optimizer steps) at the end of the run; sets the last sample of the loader.

        Args:
            args: the Trainer's.

        Raises:
            UsageError: the data ends before ``max_steps``.
        """
        loader = self._loader
        if args.max_steps > 0:
            return loader.epoch + self._epochs_of(max(args.max_steps - self._steps.step, 0)), int(args.max_steps)
        loader.stop = max(self._end_of(args.num_train_epochs), self._steps.samples)
        warn_of_left_over(loader, loader.stop - self._steps.samples)
        steps = self._steps_of(micro_batches(loader, loader.stop - self._steps.samples))
        return math.ceil(args.num_train_epochs), self._steps.step + steps

    def _epochs_of(self, steps: int) -> int:
        """The number of epochs that the next steps span, including the current one."""
        epochs, end = 0, self._steps.samples
        for epochs, end in enumerate(self._loader.epoch_ends() if steps else (), 1):
            if end - self._steps.samples >= steps * self._loader.step_samples:
                return epochs
        if (there := self._steps_of(micro_batches(self._loader, end - self._steps.samples))) < steps:
            raise UsageError(
                "the data ends before the last step",
                found=f"data for {self._steps.step + there} steps",
                expected=f"{self._steps.step + steps}: max_steps",
                cause="max_epochs of a dataset",
                action="fewer max_steps, or more max_epochs",
            )
        return epochs

    def _end_of(self, epochs: float) -> int:
        """The sample at which this many epochs since the start of the run end, or the data."""
        loader, ends = self._loader, self._loader.epoch_ends()
        end = next(ends)
        more = epochs - loader.epoch - 1  # after this one
        for _ in range(math.floor(more)):
            end = next(ends, end)
        part = more - max(math.floor(more), 0)
        there = end + math.ceil(part * loader.items)
        return there if part <= 0 else min(there, next(ends, end))

    def left(self) -> tuple[int, int]:
        """(micro-batches, optimizer steps) from here to the end of the epoch."""
        batches = micro_batches_to(self._loader, self._loader.epoch_end, self._steps.samples)
        return batches, self._steps_of(batches)

    def trained(self) -> float:
        """The number of trained epochs. The Trainer counts batches instead, of which epochs have different numbers."""
        begin, end = self._epoch
        if not begin <= self._steps.samples < end:
            before, end = end, self._loader.epoch_end
            begin = before or max(end - self._loader.items, 0)
            self._epoch = begin, end
        part = max(self._steps.samples - begin, 0) / (end - begin) if end > begin else 0.0
        return self._loader.epoch + part

    def check(self, epoch: int) -> None:
        """Raise a UsageError unless the loader has reached the epoch that the Trainer begins."""
        loader = self._loader
        if loader.epoch != epoch:
            raise UsageError(
                "control.should_epoch_stop cannot be used with megaresume.attach",
                found=f"the Trainer begins epoch {epoch}, and the data stands at sample {loader.samples}, in epoch "
                f"{loader.epoch}, which has samples up to {loader.epoch_end}",
                expected="epochs that come to their end: their other items would never be trained",
                cause="a callback set control.should_epoch_stop",
                action="control.should_training_stop ends the run, and a resume continues there; to evaluate or save "
                "within an epoch, eval_steps and save_steps; to train fewer items, torch.utils.data.Subset of the "
                "dataset",
            )

    def _steps_of(self, batches: int) -> int:
        return -(-batches // self._loader.accumulation)
