"""`TrainerHost`: Hugging Face's Trainer as the host of a `Session`.

The data state lies in ``trainer_state.json`` of a checkpoint, beside the number of steps that the weights have made.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import Envelope
from megaresume.checkpoint.topology import Topology
from megaresume.session.file_errors import writing
from megaresume.session.host import Reading, Save
from megaresume.session.ranks import on_all_ranks
from megaresume.stream.errors import StateError

#: the key in ``stateful_callbacks`` of trainer_state.json.
KEY = "megaresume"
STATE = "trainer_state.json"


class TrainerHost:
    """See `megaresume.session.host.Host`.

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

    def iteration(self) -> int:
        """See `Host`."""
        return self.step

    def samples(self) -> int:
        """See `Host`."""
        return self.trained

    def topology(self) -> Topology:
        """See `Host`."""
        loader = self.loader
        return Topology(
            world_size=loader.dp_size,
            dp=loader.dp_size,
            num_workers=loader.num_workers,
            micro_batch_size=loader.batch_size,
            global_batch_size=loader.step_samples,
        )

    def expected_files(self, save_dir: Path, tag: str) -> None:
        """See `Host`: what a Trainer writes depends on the model and the back-end."""

    def settle(self) -> None:
        """See `Host`: nothing is written in the background."""

    def is_saving(self) -> bool:
        """See `Host`."""
        return False

    def committed(self, save_dir: Path) -> None:
        """See `Host`."""

    def stepped(self) -> None:
        """An optimizer step was made, of the batches handed out last.

        Raises:
            StateError: the Trainer counts otherwise.
        """
        counted = int(self.trainer.state.global_step)
        if counted != self.step + 1:
            raise StateError(
                "the Trainer and the data count different steps",
                found=f"global_step {counted}",
                expected=f"{self.step + 1}",
                cause="the state of the Trainer was changed by hand, or loaded from another checkpoint",
                action="trainer.train(resume_from_checkpoint=True), and nothing else, loads checkpoints",
            )
        self.step, self.trained = counted, self.loader.samples
        # The Trainer's own is a fraction of the batches in an epoch, which differ from one to the next here.
        self.trainer.state.epoch = self.loader.epoch + 1 - (self.loader.epoch_end - self.trained) / self.loader.items

    def write(self, save: Save, write: Any) -> None:
        """Write a checkpoint by the Trainer's own method ``write()``, with the data state in its trainer_state.json."""
        self.trainer.state.stateful_callbacks[KEY] = save.envelope.to_dict()

        def write_files() -> None:
            with writing(save.save_dir / save.tag):
                write()

        on_all_ranks(write_files)

    def read(self, choice: Choice) -> Reading:
        """What lies with the weights, which the Trainer reads later. On every rank; raises on its own.

        Raises:
            StateError: trainer_state.json cannot be read, or what it holds of ours is damaged.
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
        return Reading(envelope=envelope, iteration=step, samples=0 if envelope is None else envelope.samples)

    # How long a run and an epoch are

    def end(self) -> tuple[int, int]:
        """(epochs, optimizer steps) with which the run ends; sets the last sample of the loader."""
        args, loader = self.trainer.args, self.loader
        size, at, items = loader.step_samples, self.trained, loader.items
        if args.max_steps > 0:
            left = max(args.max_steps - self.step, 0) * size
            epochs = 0 if not left else 1 + max(math.ceil((at + left - loader.epoch_end) / items), 0)
            return loader.epoch + epochs, int(args.max_steps)
        epochs_left = args.num_train_epochs - loader.epoch - 1  # after this one
        loader.stop = max(loader.epoch_end + math.ceil(epochs_left * items), at)
        return math.ceil(args.num_train_epochs), self.step + self._steps(self._batches(loader.stop - at))

    def batches_of_epoch(self) -> tuple[int, int]:
        """(micro-batches, optimizer steps) from here to the end of the epoch."""
        loader = self.loader
        samples = -(-(loader.epoch_end - self.trained) // loader.step_samples) * loader.step_samples
        batches = self._batches(samples if loader.stop is None else min(samples, loader.stop - self.trained))
        return batches, self._steps(batches)

    def _batches(self, samples: int) -> int:
        """Micro-batches of so many samples, of which every rank must be given some."""
        whole, rest = divmod(samples, self.loader.batch_size * self.loader.dp_size)
        return whole + (rest >= self.loader.dp_size)

    def _steps(self, batches: int) -> int:
        return -(-batches // self.loader.accumulation)
